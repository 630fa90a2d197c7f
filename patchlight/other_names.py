"""What timm's and transformers' names for a model's settings are called here, for whoever comes from there."""

# library, its name, the setting of ours, and what to write
OTHER_NAMES: tuple[tuple[str, str, str, str], ...] = (
    ("timm", "img_size", "image_size", "image_size"),
    ("timm", "in_chans", "in_channels", "in_channels"),
    ("timm", "embed_dim", "width", "width"),
    ("timm", "depth", "depths", "depths, blocks of each stage"),
    ("timm", "dims", "widths", "widths"),
    ("timm", "mlp_ratio", "mlp_dim", "mlp_dim, the hidden layer's width itself (None: four times the width)"),
    ("timm", "act_layer", "mlp", "mlp, such as 'gelu' or 'swiglu'"),
    ("timm", "norm_layer", "norm_eps", "norm_eps; every norm is a LayerNorm"),
    ("timm", "init_values", "layer_scale", "layer_scale"),
    ("timm", "ls_init_value", "layer_scale", "layer_scale"),
    ("timm", "drop_path_rate", "drop_path", "drop_path"),
    ("timm", "global_pool", "pooling", "pooling: 'token' is 'cls', 'avg' is 'mean', 'map' is 'attention'"),
    ("timm", "reg_tokens", "num_registers", "num_registers"),
    ("timm", "no_embed_class", "prefix_positions", "prefix_positions='none'"),
    ("timm", "pre_norm", "embed_norm", "embed_norm"),
    ("timm", "fc_norm", "final_norm", "final_norm='pooled'"),
    ("timm", "pos_embed", "position", "position"),
    ("timm", "use_rot_pos_emb", "position", "position='rope2d'"),
    ("timm", "use_rel_pos_bias", "position", "position='relative_bias'"),
    ("timm", "dynamic_img_pad", "uneven_size", "uneven_size='pad'"),
    ("timm", "scale_mlp_norm", "inner_norm", "inner_norm='mlp'"),
    ("timm", "swiglu_mlp", "mlp", "mlp='swiglu'"),
    ("timm", "kernel_sizes", "kernel_size", "kernel_size, the same in all stages"),
    ("timm", "use_grn", "grn", "grn"),
    ("transformers", "num_channels", "in_channels", "in_channels"),
    ("transformers", "hidden_size", "width", "width"),
    ("transformers", "hidden_sizes", "widths", "widths"),
    ("transformers", "embed_dim", "width", "width"),
    ("transformers", "num_hidden_layers", "depth", "depth"),
    ("transformers", "num_attention_heads", "num_heads", "num_heads"),
    ("transformers", "intermediate_size", "mlp_dim", "mlp_dim"),
    ("transformers", "hidden_act", "mlp", "mlp, such as 'gelu' or 'swiglu'"),
    ("transformers", "layer_norm_eps", "norm_eps", "norm_eps"),
    ("transformers", "layerscale_value", "layer_scale", "layer_scale"),
    ("transformers", "layer_scale_init_value", "layer_scale", "layer_scale"),
    ("transformers", "drop_path_rate", "drop_path", "drop_path"),
    ("transformers", "num_labels", "num_classes", "num_classes"),
    ("transformers", "num_register_tokens", "num_registers", "num_registers"),
    ("transformers", "rope_theta", "rope_base", "rope_base"),
    ("transformers", "use_gated_mlp", "mlp", "mlp='swiglu'"),
    ("transformers", "use_swiglu_ffn", "mlp", "mlp='swiglu'"),
    ("transformers", "use_mean_pooling", "pooling", "pooling='mean'"),
    ("transformers", "use_absolute_position_embeddings", "position", "position='learned'"),
    ("transformers", "use_relative_position_bias", "position", "position='relative_bias'"),
)


def other_name(name: str, settings: list[str]) -> str | None:
    """Which of these settings another library calls `name`: "timm's init_values is layer_scale here"."""
    for library, theirs, ours, written in OTHER_NAMES:
        if theirs == name and ours in settings:
            whose = "timm's" if library == "timm" else f"{library}'"
            return f"{whose} {theirs} is {written} here"
    return None
