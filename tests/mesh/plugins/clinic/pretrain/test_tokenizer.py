"""The tiny model's tokenizer: whole words, any text, and one beginning per conversation."""

import pytest
from transformers import PreTrainedTokenizerFast

from models.pretrain.tokenizer import SPECIAL, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def test_special_tokens_come_first_and_have_their_roles(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2, 3, 4, 5]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
