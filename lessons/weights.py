"""The weights of `pl.ViT` under the names that `plain_vit.py` gives them."""

RENAMED = {
    "E_pos": "positions.table",
    "x_class": "class_token",
    "E.": "patch_embed.proj.",
    "LN.": "norm.",
    "head.": "head.out.",
    "LN1.": "norm1.",
    "LN2.": "norm2.",
    "MSA.U_qkv.": "attn.qkv.",
    "MSA.U_msa.": "attn.out.",
    "MLP.0.": "mlp.up.",
    "MLP.2.": "mlp.down.",
}


def copy_weights(vit, plain):
    """Put the weights of a `pl.ViT` into a `PlainViT` of the same sizes."""
    theirs, ours = vit.state_dict(), {}
    for name, value in plain.state_dict().items():
        block, rest = "", name
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            block = f"blocks.{number}."
        start = next(start for start in RENAMED if rest.startswith(start))
        ours[name] = theirs[block + RENAMED[start] + rest.removeprefix(start)].reshape(value.shape)
    plain.load_state_dict(ours)
    return plain
