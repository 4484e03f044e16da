"""Models that others trained, in Hugging Face format. No code that comes with them is run."""
import contextlib
import os

import torch
import transformers
from safetensors import safe_open
from transformers.utils import cached_file

from oec import sources
from oec.common import check, read_json

UNREADABLE = '--hf={}: not a causal language model that can be read'
transformers.logging.set_verbosity_error()


def place(name):
    """FOLDER, NAME or NAME@REVISION -> the folder or hub name, and the options of from_pretrained."""
    path, _, revision = (name, '', '') if os.path.isdir(name) else name.partition('@')
    return path, dict(revision=revision or 'main', trust_remote_code=False)


def load(name):
    """The model of this name, in its own dtype, and its tokenizer."""
    path, options = place(name)
    with sources.naming(UNREADABLE.format(name)):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype='auto', output_loading_info=True, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    check(not found['missing_keys'], f'--hf={name}: its files lack weights')
    return model.eval().to('cuda' if torch.cuda.is_available() else 'cpu'), tokenizer


def load_output_embeddings(name):
    """E (V, H) of the model of this name. Of safetensors files no other tensor is read."""
    path, options = place(name)
    file_of = {}  # tensor name -> file
    with sources.naming(UNREADABLE.format(name)):
        with torch.device('meta'):
            shapes = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(path, **options))
        with contextlib.suppress(OSError):  # if there are several files
            file_of = read_json(cached_file(path, 'model.safetensors.index.json', **options))['weight_map']
        with contextlib.suppress(OSError):  # if there is one
            with safe_open(cached_file(path, 'model.safetensors', **options), 'pt') as file:
                file_of = dict.fromkeys(file.keys(), 'model.safetensors')
    E = shapes.get_output_embeddings().weight
    its_names = [key for key, tensor in shapes.named_parameters(remove_duplicate=False) if tensor is E]
    for key in file_of:  # a file may leave out the first part of a name
        if any(f'.{whole}'.endswith(f'.{key}') for whole in its_names):
            with sources.naming(UNREADABLE.format(name)):
                with safe_open(cached_file(path, file_of[key], **options), 'pt') as file:
                    return file.get_tensor(key)
    return load(name)[0].get_output_embeddings().weight
