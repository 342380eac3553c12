"""Training the head on a frozen trunk."""
