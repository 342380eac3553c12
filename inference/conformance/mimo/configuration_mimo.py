from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
