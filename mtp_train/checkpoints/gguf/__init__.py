"""Write heads as GGUF files for llama.cpp."""
