"""Losses between the MTP head's distribution and the trunk's. Importing ``catalogue`` alone imports no torch."""
