"""Reads a GGUF file with numpy alone: metadata, tensors as f32, a tokenizer, a model for transformers.

It serves the references of the benchmarks, so it shares no code with what they check and needs no package
for GGUF. Llama architectures with F32, F16, Q4_1 and Q8_0 tensors and a byte-level BPE of kind `smollm`:
what SmolLM2-135M needs. Left out: every other format, which is refused by its number.
"""

import struct
from pathlib import Path

import numpy as np

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL_TOKEN = 3


def decode_f32(data: np.ndarray, elements: int) -> np.ndarray:
    return data[: 4 * elements].view("<f4")


def decode_f16(data: np.ndarray, elements: int) -> np.ndarray:
    return data[: 2 * elements].view("<f2").astype(np.float32)


def decode_q4_1(data: np.ndarray, elements: int) -> np.ndarray:
    """Blocks of 32: scale and minimum in f16, then 16 bytes: element j in the low half of byte j, j + 16 in the high."""
    blocks = data[: elements // 32 * 20].reshape(-1, 20)
    scale, minimum = (blocks[:, at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scale * codes.astype(np.float32) + minimum).reshape(-1)


def decode_q8_0(data: np.ndarray, elements: int) -> np.ndarray:
    """Blocks of 32: a scale in f16, then 32 signed bytes."""
    blocks = data[: elements // 32 * 34].reshape(-1, 34)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return (scale * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(-1)


DECODERS = {0: decode_f32, 1: decode_f16, 3: decode_q4_1, 8: decode_q8_0}


class GgufFile:
    """`metadata` by key; `tensor(name)` as f32 in the shape that PyTorch would have."""

    def __init__(self, path: Path):
        self.bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self.at = 0
        magic, _version, tensors, pairs = self.take("<4sIQQ")
        if magic != b"GGUF":
            raise SystemExit(f"error: `{path}` is no GGUF file")
        self.metadata = {self.take_string(): self.take_value(self.take("<I")[0]) for _ in range(pairs)}
        self.places = {}
        for _ in range(tensors):
            name = self.take_string()
            (dimensions,) = self.take("<I")
            shape = self.take(f"<{dimensions}Q")[::-1]
            self.places[name] = (shape, *self.take("<IQ"))
        alignment = self.metadata.get("general.alignment", 32)
        self.data_start = -(-self.at // alignment) * alignment

    def take(self, form: str) -> tuple:
        size = struct.calcsize(form)
        values = struct.unpack(form, self.bytes[self.at : self.at + size].tobytes())
        self.at += size
        return values

    def take_string(self) -> str:
        (size,) = self.take("<Q")
        self.at += size
        return self.bytes[self.at - size : self.at].tobytes().decode("utf-8")

    def take_value(self, kind: int):
        if kind == STRING:
            return self.take_string()
        if kind == ARRAY:
            inner, count = self.take("<IQ")
            return [self.take_value(inner) for _ in range(count)]
        return self.take("<" + SCALARS[kind])[0]

    def tensor(self, name: str) -> np.ndarray:
        shape, kind, offset = self.places[name]
        if kind not in DECODERS:
            raise SystemExit(f"error: `{name}` is of GGML type {kind}, which this reader does not know")
        return DECODERS[kind](self.bytes[self.data_start + offset :], int(np.prod(shape))).reshape(shape)


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as Hugging Face has them; the converter interleaves the halves of each head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hugging_face_tensors(file: GgufFile) -> dict[str, np.ndarray]:
    layer_names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    tensors = {
        "model.embed_tokens.weight": file.tensor("token_embd.weight"),
        "model.norm.weight": file.tensor("output_norm.weight"),
    }
    tied = "output.weight" not in file.places
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] if tied else file.tensor("output.weight")
    for layer in range(file.metadata["llama.block_count"]):
        for theirs, ours in layer_names.items():
            weight = file.tensor(f"blk.{layer}.{theirs}.weight")
            if theirs in heads:
                weight = unpermuted(weight, file.metadata[heads[theirs]])
            tensors[f"model.layers.{layer}.{ours}.weight"] = weight
    return tensors


def load_model(file: GgufFile):
    """The model in f32, as transformers would have it from the decoded weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if file.metadata["general.architecture"] != "llama":
        raise SystemExit(f"error: architecture `{file.metadata['general.architecture']}` is not llama")
    key = lambda name: file.metadata[f"llama.{name}"]
    config = LlamaConfig(
        hidden_size=key("embedding_length"), num_hidden_layers=key("block_count"),
        num_attention_heads=key("attention.head_count"), num_key_value_heads=key("attention.head_count_kv"),
        intermediate_size=key("feed_forward_length"), vocab_size=key("vocab_size"),
        max_position_embeddings=key("context_length"), rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in file.places,
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base")},
        bos_token_id=file.metadata["tokenizer.ggml.bos_token_id"], eos_token_id=file.metadata["tokenizer.ggml.eos_token_id"],
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in hugging_face_tensors(file).items()}
    model.load_state_dict(tensors, strict=True)
    model.config.use_cache = False
    return model


def load_tokenizer(file: GgufFile):
    """A `tokenizers.Tokenizer`; special tokens in a text are recognized, none is added."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (file.metadata["tokenizer.ggml.model"], file.metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise SystemExit(f"error: the tokenizer is {kind}, not a byte-level BPE of kind smollm")
    tokens = file.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def render_chat(file: GgufFile, messages: list[dict], add_generation_prompt: bool) -> str:
    """The model's own template, in the settings that Hugging Face gives to Jinja."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(file.metadata["tokenizer.chat_template"])
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)
