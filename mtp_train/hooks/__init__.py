"""Keep or train the MTP head while another trainer fine-tunes the model."""
