"""Drive a serving engine that lives in an environment of its own, and compare what it says with our decoder."""
