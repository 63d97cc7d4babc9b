"""The weights, config and tokenizer of tinybook-mlp, which `locas_peft.backbone.load` reads."""
