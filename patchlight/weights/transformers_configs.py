"""transformers' config.json, key by key: what is followed, what must have one value, and what changes nothing.

A key that is in none of these tables ends up in `notes`. Each family says how its model types are read (`ModelType`); a
model type of no family is refused by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from patchlight.weights.read import CheckpointError

# Keys that change nothing in what a loaded model computes; names with spaces between.
_TENSORS_TELL = (
    "hidden_size hidden_sizes embed_dim num_hidden_layers num_layers num_stages depths num_heads intermediate_size "
    "mlp_ratio num_channels patch_size qkv_bias query_bias key_bias value_bias proj_bias mlp_bias num_register_tokens "
    "projection_dim layerscale_value layer_scale_init_value use_swiglu_ffn use_gated_mlp vision_use_head "
    "use_absolute_position_embeddings use_relative_position_bias use_shared_relative_position_bias "
    "num_labels id2label label2id problem_type "
)
_TRAINING = (
    "hidden_dropout_prob attention_probs_dropout_prob attention_dropout dropout drop_path_rate initializer_range "
    "initializer_factor pos_embed_shift pos_embed_jitter pos_embed_rescale logit_scale_init_value "
    "semantic_loss_ignore_index "
)
_LEFT_OUT = (  # poolers, decoders, mask tokens, heads for other tasks, and what a backbone gives
    "pooler_act pooler_output_size encoder_stride vocab_size use_mask_token mask_ratio norm_pix_loss "
    "decoder_hidden_size decoder_intermediate_size decoder_num_attention_heads decoder_num_hidden_layers "
    "pool_scales use_auxiliary_head auxiliary_loss_weight auxiliary_channels auxiliary_num_convs "
    "auxiliary_concat_input add_fpn segmentation_indices out_features out_indices stage_names apply_layernorm "
    "reshape_hidden_states return_class_token "
)
_BOOKKEEPING = (
    "model_type architectures transformers_version dtype torch_dtype _name_or_path name_or_path _commit_hash auto_map "
    "return_dict output_hidden_states output_attentions tie_last_hidden_states chunk_size_feed_forward "
    "attn_implementation _attn_implementation_autoset is_encoder_decoder path_norm use_return_dict "
)
_OF_TEXT = (  # in files by older versions of transformers, whatever the model
    "add_cross_attention bad_words_ids begin_suppress_tokens bos_token_id cross_attention_hidden_size "
    "decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id is_decoder "
    "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "output_scores pad_token_id prefix remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id "
    "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings "
    "tokenizer_class top_k top_p torchscript typical_p use_bfloat16 use_cache "
)
HARMLESS = frozenset(f"{_TENSORS_TELL}{_TRAINING}{_LEFT_OUT}{_BOOKKEEPING}{_OF_TEXT}".split())

# What is followed in a config.json that names no model type.
_COMMON = ("num_attention_heads", "hidden_act", "layer_norm_eps", "image_size")

# What must be empty, whatever the model.
NEVER = ("per_layer_config", "pruned_heads", "quantization_config")


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """How transformers reads the config.json of its models of one type."""

    defaults: Mapping[str, Any]
    """The keys that are followed, and what transformers takes where the file does not say."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """Our settings that hold for every model of the type."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change the computation, and the only value that is supported."""


_INSIDE = ("vision_config", "backbone_config", "encoder")
"""Where a model of several parts keeps the config of its image encoder."""


@dataclass(frozen=True)
class Keys:
    """The settings of the image encoder in a config.json."""

    model_type: str
    values: Mapping[str, Any]
    """Its keys, and for those that are followed what transformers takes where it does not say."""
    told: Mapping[str, Any]
    unknown: tuple[str, ...]


def read_keys(config: Mapping[str, Any], model_types: Mapping[str, ModelType], source: str) -> Keys:
    """The keys of the image encoder in a config.json; what we do not have is refused by name."""
    part = next((config[name] for name in _INSIDE if isinstance(config.get(name), dict)), config)
    if not isinstance(config.get("vision_config") or {}, dict):
        raise CheckpointError(
            f"{source}: config.json says vision_config={config['vision_config']!r:.60}; it has settings"
        )
    name = part.get("model_type") or (f"{config.get('model_type')}_vision_model" if part is not config else "")
    given = {key: value for key, value in part.items() if value is not None}
    for key in NEVER:
        value = given.get(key) or config.get(key)
        if value:
            raise CheckpointError(f"{source}: config.json says {key}={value!r:.80}, which is not supported")
    if not name:  # not transformers' own, but somebody's that has some of its keys
        return Keys("", given, {}, tuple(sorted(set(given) - HARMLESS - set(_COMMON))))
    if name not in model_types:
        raise CheckpointError(
            f"{source}: config.json says model_type={name!r}, and transformers' models of that type are not supported"
        )
    kind = model_types[name]
    for key, value in kind.only.items():
        if given.get(key, value) != value:
            raise CheckpointError(
                f"{source}: config.json says {key}={given[key]!r}; transformers' {name} is supported with {value!r} "
                "only"
            )
    values = {**kind.defaults, **given}
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    known = HARMLESS | {*kind.defaults, *kind.only, *NEVER}
    if width and heads:
        known |= {"head_dim"}
        if given.get("head_dim", width // heads) != width // heads:
            raise CheckpointError(f"{source}: config.json says head_dim={given['head_dim']}; ours is {width}/{heads}")
    unknown = set(given) - known
    return Keys(name, values, kind.told, tuple(sorted(unknown)))


def note_unknown(keys: Keys) -> tuple[str, ...]:
    if not keys.unknown:
        return ()
    return (f"settings in config.json that we do not know, taken to change nothing: {', '.join(keys.unknown)}",)


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def activation(keys: Keys, have: tuple[str, ...], source: str, where: str = "") -> str | None:
    """The MLP's activation by config.json, in our name; None if it is silent; one that is not in `have` raises."""
    said = keys.values.get("hidden_act")
    if said is None:
        return None
    ours = ACTIVATIONS.get(said) if isinstance(said, str) else None
    if ours not in have:
        raise CheckpointError(f"{source}: config.json says hidden_act={said!r}{where}, which is not supported")
    return ours
