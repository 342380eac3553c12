"""Records in, packed token sequences out; and the trunk's own responses in place of the dataset's."""
