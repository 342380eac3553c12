"""The family records, one file a vendor."""
