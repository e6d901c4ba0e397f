"""Makes tiny embedding models and cross-encoders with random weights and tokenizers of the usual kinds, and computes
reference embeddings and scores with transformers and the formulae of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import checkpoints
import torch
import transformers
import vocabulary
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = """the cat dog sat on mat river bank of in money fish swims fast slow paris capital france""".split()  # noqa: SIM905
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.2,
}


def make_encoder(
    folder: Path, kind: str = "bert", *, pooling: str | None = None, normalize: bool = True, **changes: Any
) -> Path:
    """kind: bert or xlm-roberta. pooling: as sentence-transformers calls it; None: none of its files."""
    return _make(folder, kind, transformers.AutoModel, pooling, normalize, changes)


def make_cross_encoder(folder: Path, kind: str = "bert", **changes: Any) -> Path:
    """A model that scores pairs."""
    auto = transformers.AutoModelForSequenceClassification
    return _make(folder, kind, auto, None, False, {"num_labels": 1, **changes})


def make_decoder(
    folder: Path, kind: str, *, pooling: str | None = "lasttoken", normalize: bool = True, bare: bool = True
) -> Path:
    """kind: one of `checkpoints`. bare: the body alone is saved, without the head."""
    checkpoints.make_checkpoint(folder, kind)
    if bare:
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        model.save_pretrained(folder)
    vocabulary.add_tokenizer(folder)
    if pooling is not None:
        add_sentence_files(folder, pooling, normalize)
    return folder


def add_sentence_files(folder: Path, pooling: str, normalize: bool, **more: Any) -> None:
    """Adds the files that sentence-transformers writes beside a model."""
    parts = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{part}"}
        for i, (part, path) in enumerate(zip(parts, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    config = {f"pooling_mode_{flag}": name == pooling for name, flag in modes.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **config}))
    prompts = {"query": "the cat ", "document": ""}
    settings = {"prompts": prompts, "default_prompt_name": None, **more}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def reference_embedding(
    folder: Path, ids: list[int], pooling: str, *, normalize: bool = True, dimensions: int | None = None
) -> torch.Tensor:
    """One prompt alone, in float32."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    vector = {"lasttoken": states[-1], "cls": states[0], "mean": states.mean(0), "all": states}[pooling]
    vector = vector[..., :dimensions]
    return torch.nn.functional.normalize(vector, dim=-1) if normalize else vector


def reference_score(folder: Path, first: str, second: str) -> float:
    """The logit of one pair alone, in float32."""
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        takes_types = getattr(model.config, "type_vocab_size", 0) > 1
        pair = tokenizer(first, second, return_tensors="pt", return_token_type_ids=takes_types)
        return float(model(**pair).logits[0, 0])


def _make(folder: Path, kind: str, auto: Any, pooling: str | None, normalize: bool, changes: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    size = {"bert": _word_pieces, "xlm-roberta": _unigrams}[kind](folder)
    own = {"type_vocab_size": 2, "pad_token_id": 0} if kind == "bert" else {"type_vocab_size": 1, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, vocab_size=size, **{**_SIZES, **own, **changes})
    state = torch.get_rng_state()
    torch.manual_seed(len(kind))
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero by default, which would hide a bias in the wrong place
                parameter.normal_(std=0.2)
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    if pooling is not None:
        add_sentence_files(folder, pooling, normalize)
    return folder


def _word_pieces(folder: Path) -> int:
    """A tokenizer as BERT's. Like many such files it enables truncation and padding, which a server must ignore."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz"]
    vocab = [*special, *letters, *(f"##{c}" for c in letters), *WORDS]
    ids = {word: i for i, word in enumerate(vocab)}
    tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    tokenizer.add_special_tokens(special)
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128)
    return _save(folder, tokenizer, {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"})


def _unigrams(folder: Path) -> int:
    """A tokenizer as XLM-RoBERTa's."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*special, *(f"▁{w}" for w in WORDS), *"▁abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(special)
    return _save(folder, tokenizer, {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"})


def _save(folder: Path, tokenizer: Tokenizer, named: dict[str, str]) -> int:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()
