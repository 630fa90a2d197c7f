"""What others call the parts of a ViT: one table of names an origin, as data.

A row pairs their name with ours; `{}` is a block's number, and a row that ends in a dot stands for everything below it.
The first row that matches a key renames it. Read from right to left, the same table writes their names.
Names of ours that end in `attn.q`, `attn.k` and `attn.v` are the three parts of `attn.qkv`.
"""

Names = tuple[tuple[str, str], ...]

OURS: Names = (
    ("patch_embed.", "patch_embed."),
    ("class_token", "class_token"),
    ("distill_token", "distill_token"),
    ("registers", "registers"),
    ("positions.", "positions."),
    ("embed_norm.", "embed_norm."),
    ("blocks.", "blocks."),
    ("norm.", "norm."),
    ("head.", "head."),
    ("distill_head.", "distill_head."),
    ("attention_pool.", "attention_pool."),
)

TIMM: Names = (
    ("cls_token", "class_token"),
    ("dist_token", "distill_token"),
    ("reg_token", "registers"),
    ("register_tokens", "registers"),  # DINOv2
    ("storage_tokens", "registers"),  # DINOv3
    ("pos_embed", "positions.table"),
    ("patch_embed.proj.", "patch_embed.proj."),
    ("norm_pre.", "embed_norm."),
    ("norm.", "norm."),
    ("fc_norm.", "norm."),
    ("pre_logits.fc.", "head.hidden."),
    ("head.fc1.", "head.hidden."),
    ("head.", "head.out."),
    ("head_dist.", "distill_head.out."),
    ("blocks.{}.attn.proj.", "blocks.{}.attn.out."),
    ("blocks.{}.attn.qkv.", "blocks.{}.attn.qkv."),
    ("blocks.{}.attn.q_norm.", "blocks.{}.attn.q_norm."),
    ("blocks.{}.attn.k_norm.", "blocks.{}.attn.k_norm."),
    ("blocks.{}.attn.norm.", "blocks.{}.attn.norm."),
    ("blocks.{}.attn.rel_pos.relative_position_bias_table", "blocks.{}.attn.relative_bias.table"),
    ("blocks.{}.attn.relative_position_bias_table", "blocks.{}.attn.relative_bias.table"),  # BEiT
    ("blocks.{}.attn.rel_pos.mlp.fc1.", "blocks.{}.attn.relative_bias.hidden."),
    ("blocks.{}.attn.rel_pos.mlp.fc2.", "blocks.{}.attn.relative_bias.out."),
    ("blocks.{}.attn.rope.frequencies", "blocks.{}.attn.rope.frequencies"),
    ("blocks.{}.ls1.gamma", "blocks.{}.residual1.scale"),
    ("blocks.{}.ls2.gamma", "blocks.{}.residual2.scale"),
    ("blocks.{}.gamma_1", "blocks.{}.residual1.scale"),
    ("blocks.{}.gamma_2", "blocks.{}.residual2.scale"),
    ("blocks.{}.norm1.", "blocks.{}.norm1."),
    ("blocks.{}.norm2.", "blocks.{}.norm2."),
    ("blocks.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("blocks.{}.mlp.fc2.", "blocks.{}.mlp.down."),
    ("blocks.{}.mlp.norm.", "blocks.{}.mlp.norm."),
    ("blocks.{}.mlp.w12.", "blocks.{}.mlp.gate_and_up."),  # DINOv2's gated MLP
    ("blocks.{}.mlp.w1.", "blocks.{}.mlp.gate."),  # DINOv3's gated MLP
    ("blocks.{}.mlp.w2.", "blocks.{}.mlp.up."),
    ("blocks.{}.mlp.w3.", "blocks.{}.mlp.down."),
    ("blocks.{}.mlp.fc1_g.", "blocks.{}.mlp.gate."),
    ("blocks.{}.mlp.fc1_x.", "blocks.{}.mlp.up."),
    ("attn_pool.latent", "attention_pool.query"),
    ("attn_pool.q.", "attention_pool.q."),
    ("attn_pool.kv.", "attention_pool.kv."),
    ("attn_pool.proj.", "attention_pool.out."),
    ("attn_pool.norm.", "attention_pool.norm."),
    ("attn_pool.mlp.fc1.", "attention_pool.mlp.up."),
    ("attn_pool.mlp.fc2.", "attention_pool.mlp.down."),
)

# What the EVA models have beyond TIMM; apart from it, since we write queries, keys and values as one matrix.
EVA: Names = (
    ("blocks.{}.attn.q_proj.", "blocks.{}.attn.q."),
    ("blocks.{}.attn.k_proj.", "blocks.{}.attn.k."),
    ("blocks.{}.attn.v_proj.", "blocks.{}.attn.v."),
)

# The ResNet in front of timm's hybrids; with no stages it has no stem, but is one.
HYBRID: Names = (
    ("patch_embed.backbone.conv.", "patch_embed.resnet.conv."),
    ("patch_embed.backbone.norm.", "patch_embed.resnet.norm."),
    ("patch_embed.backbone.stem.conv.", "patch_embed.resnet.conv."),
    ("patch_embed.backbone.stem.norm.", "patch_embed.resnet.norm."),
    (
        "patch_embed.backbone.stages.{}.blocks.{}.downsample.conv.",
        "patch_embed.resnet.stages.{}.{}.shortcut_conv.",
    ),
    (
        "patch_embed.backbone.stages.{}.blocks.{}.downsample.norm.",
        "patch_embed.resnet.stages.{}.{}.shortcut_norm.",
    ),
    ("patch_embed.backbone.stages.{}.blocks.{}.", "patch_embed.resnet.stages.{}.{}."),
)

TRANSFORMERS: Names = (
    ("embeddings.cls_token", "class_token"),
    ("embeddings.distillation_token", "distill_token"),
    ("embeddings.register_tokens", "registers"),
    ("embeddings.position_embeddings", "positions.table"),
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("embeddings.patch_embeddings.", "patch_embed.proj."),  # DINOv3
    ("layernorm.", "norm."),
    ("norm.", "norm."),  # DINOv3
    ("classifier.", "head.out."),
    ("cls_classifier.", "head.out."),
    ("distillation_classifier.", "distill_head.out."),
    ("layers.{}.layernorm_before.", "blocks.{}.norm1."),
    ("layers.{}.layernorm_after.", "blocks.{}.norm2."),
    ("layers.{}.norm1.", "blocks.{}.norm1."),
    ("layers.{}.norm2.", "blocks.{}.norm2."),
    ("layers.{}.attention.q_proj.", "blocks.{}.attn.q."),
    ("layers.{}.attention.k_proj.", "blocks.{}.attn.k."),
    ("layers.{}.attention.v_proj.", "blocks.{}.attn.v."),
    ("layers.{}.attention.o_proj.", "blocks.{}.attn.out."),
    ("layers.{}.attention.attention.query.", "blocks.{}.attn.q."),  # before transformers 5
    ("layers.{}.attention.attention.key.", "blocks.{}.attn.k."),
    ("layers.{}.attention.attention.value.", "blocks.{}.attn.v."),
    ("layers.{}.attention.output.dense.", "blocks.{}.attn.out."),
    ("layers.{}.layer_scale1.lambda1", "blocks.{}.residual1.scale"),
    ("layers.{}.layer_scale2.lambda1", "blocks.{}.residual2.scale"),
    ("layers.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("layers.{}.mlp.fc2.", "blocks.{}.mlp.down."),
    ("layers.{}.intermediate.dense.", "blocks.{}.mlp.up."),  # before transformers 5
    ("layers.{}.output.dense.", "blocks.{}.mlp.down."),
    ("layers.{}.mlp.weights_in.", "blocks.{}.mlp.gate_and_up."),
    ("layers.{}.mlp.weights_out.", "blocks.{}.mlp.down."),
    ("layers.{}.mlp.gate_proj.", "blocks.{}.mlp.gate."),
    ("layers.{}.mlp.up_proj.", "blocks.{}.mlp.up."),
    ("layers.{}.mlp.down_proj.", "blocks.{}.mlp.down."),
)

# What BEiT has beyond TRANSFORMERS.
BEIT: Names = (
    ("pooler.layernorm.", "norm."),
    ("layers.{}.lambda_1", "blocks.{}.residual1.scale"),
    ("layers.{}.lambda_2", "blocks.{}.residual2.scale"),
    (
        "layers.{}.relative_position_bias.relative_position_bias_table",
        "blocks.{}.attn.relative_bias.table",
    ),
    (
        "layers.{}.attention.attention.relative_position_bias.relative_position_bias_table",  # before transformers 5
        "blocks.{}.attn.relative_bias.table",
    ),
)

TRANSFORMERS_CLIP: Names = (
    ("embeddings.class_embedding", "class_token"),
    ("embeddings.position_embedding.weight", "positions.table"),
    ("embeddings.patch_embedding.", "patch_embed.proj."),
    ("pre_layrnorm.", "embed_norm."),
    ("post_layernorm.", "norm."),
    ("visual_projection.", "head.out."),
    ("classifier.", "head.out."),
    ("encoder.layers.{}.layer_norm1.", "blocks.{}.norm1."),
    ("encoder.layers.{}.layer_norm2.", "blocks.{}.norm2."),
    ("encoder.layers.{}.self_attn.q_proj.", "blocks.{}.attn.q."),
    ("encoder.layers.{}.self_attn.k_proj.", "blocks.{}.attn.k."),
    ("encoder.layers.{}.self_attn.v_proj.", "blocks.{}.attn.v."),
    ("encoder.layers.{}.self_attn.out_proj.", "blocks.{}.attn.out."),
    ("encoder.layers.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("encoder.layers.{}.mlp.fc2.", "blocks.{}.mlp.down."),
)

TRANSFORMERS_SIGLIP: Names = (
    *TRANSFORMERS_CLIP,
    ("head.probe", "attention_pool.query"),
    ("head.q.", "attention_pool.q."),
    ("head.kv.", "attention_pool.kv."),
    ("head.attention.out_proj.", "attention_pool.out."),
    ("head.layernorm.", "attention_pool.norm."),
    ("head.mlp.fc1.", "attention_pool.mlp.up."),
    ("head.mlp.fc2.", "attention_pool.mlp.down."),
)

OPEN_CLIP: Names = (
    ("class_embedding", "class_token"),
    ("positional_embedding", "positions.table"),
    ("conv1.", "patch_embed.proj."),
    ("ln_pre.", "embed_norm."),
    ("ln_post.", "norm."),
    ("proj.", "head.out."),
    ("transformer.resblocks.{}.ln_1.", "blocks.{}.norm1."),
    ("transformer.resblocks.{}.ln_2.", "blocks.{}.norm2."),
    ("transformer.resblocks.{}.ls_1.gamma", "blocks.{}.residual1.scale"),
    ("transformer.resblocks.{}.ls_2.gamma", "blocks.{}.residual2.scale"),
    ("transformer.resblocks.{}.attn.in_proj_weight", "blocks.{}.attn.qkv.weight"),
    ("transformer.resblocks.{}.attn.in_proj_bias", "blocks.{}.attn.qkv.bias"),
    ("transformer.resblocks.{}.attn.out_proj.", "blocks.{}.attn.out."),
    ("transformer.resblocks.{}.mlp.c_fc.", "blocks.{}.mlp.up."),
    ("transformer.resblocks.{}.mlp.c_proj.", "blocks.{}.mlp.down."),
)

TORCHVISION: Names = (
    ("class_token", "class_token"),
    ("conv_proj.", "patch_embed.proj."),
    ("encoder.pos_embedding", "positions.table"),
    ("encoder.ln.", "norm."),
    ("heads.pre_logits.", "head.hidden."),
    ("heads.head.", "head.out."),
    ("encoder.layers.encoder_layer_{}.ln_1.", "blocks.{}.norm1."),
    ("encoder.layers.encoder_layer_{}.ln_2.", "blocks.{}.norm2."),
    ("encoder.layers.encoder_layer_{}.self_attention.in_proj_weight", "blocks.{}.attn.qkv.weight"),
    ("encoder.layers.encoder_layer_{}.self_attention.in_proj_bias", "blocks.{}.attn.qkv.bias"),
    ("encoder.layers.encoder_layer_{}.self_attention.out_proj.", "blocks.{}.attn.out."),
    ("encoder.layers.encoder_layer_{}.mlp.0.", "blocks.{}.mlp.up."),
    ("encoder.layers.encoder_layer_{}.mlp.3.", "blocks.{}.mlp.down."),
    ("encoder.layers.encoder_layer_{}.mlp.linear_1.", "blocks.{}.mlp.up."),
    ("encoder.layers.encoder_layer_{}.mlp.linear_2.", "blocks.{}.mlp.down."),
)

JAX: Names = (
    ("cls", "class_token"),
    ("embedding.", "patch_embed.proj."),
    ("Transformer.posembed_input.pos_embedding", "positions.table"),
    ("pos_embedding", "positions.table"),
    ("Transformer.encoder_norm.", "norm."),
    ("pre_logits.", "head.hidden."),
    ("head.", "head.out."),
    ("Transformer.encoderblock_{}.LayerNorm_0.", "blocks.{}.norm1."),
    ("Transformer.encoderblock_{}.LayerNorm_1.", "blocks.{}.norm2."),
    ("Transformer.encoderblock_{}.LayerNorm_2.", "blocks.{}.norm2."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_0.query.", "blocks.{}.attn.q."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_0.key.", "blocks.{}.attn.k."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_0.value.", "blocks.{}.attn.v."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_0.out.", "blocks.{}.attn.out."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_1.query.", "blocks.{}.attn.q."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_1.key.", "blocks.{}.attn.k."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_1.value.", "blocks.{}.attn.v."),
    ("Transformer.encoderblock_{}.MultiHeadDotProductAttention_1.out.", "blocks.{}.attn.out."),
    ("Transformer.encoderblock_{}.MlpBlock_0.Dense_0.", "blocks.{}.mlp.up."),
    ("Transformer.encoderblock_{}.MlpBlock_0.Dense_1.", "blocks.{}.mlp.down."),
    ("Transformer.encoderblock_{}.MlpBlock_3.Dense_0.", "blocks.{}.mlp.up."),
    ("Transformer.encoderblock_{}.MlpBlock_3.Dense_1.", "blocks.{}.mlp.down."),
    ("MAPHead_0.probe", "attention_pool.query"),
    ("MAPHead_0.MultiHeadDotProductAttention_0.query.", "attention_pool.q."),
    ("MAPHead_0.MultiHeadDotProductAttention_0.key.", "attention_pool.k."),
    ("MAPHead_0.MultiHeadDotProductAttention_0.value.", "attention_pool.v."),
    ("MAPHead_0.MultiHeadDotProductAttention_0.out.", "attention_pool.out."),
    ("MAPHead_0.LayerNorm_0.", "attention_pool.norm."),
    ("MAPHead_0.MlpBlock_0.Dense_0.", "attention_pool.mlp.up."),
    ("MAPHead_0.MlpBlock_0.Dense_1.", "attention_pool.mlp.down."),
)
