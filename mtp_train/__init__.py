"""Put the MTP head back on a fine-tuned model, retrain it, prove the gain, and export it for stock engines."""

__version__ = "0.1.0"
