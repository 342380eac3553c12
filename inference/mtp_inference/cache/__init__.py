"""KV caches and recurrent states of every kind of layer, with rollback."""
