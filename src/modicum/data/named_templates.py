"""Chat templates that a recipe can name, for models that have none.

They are written so that others run them too: plain Jinja as `transformers` has it, without
`{% generation %}`. Of a new model, the tokenizer that is trained gets their special tokens.
"""

from __future__ import annotations

from modicum.data.chat_template import ChatTemplate

_NO_TOOLS = (
    "{% if tools or messages | selectattr('tool_calls', 'defined') | list or "
    "messages | selectattr('role', 'equalto', 'tool') | list %}"
    "{{ raise_exception('this template writes no tools and calls of them; take chatml') }}"
    "{% endif %}"
)
_CHATML = (
    "{% set begun = messages and messages[0].role == 'system' %}{% if tools %}<|im_start|>system\n"
    "{% if begun %}{{ messages[0].content }}\n\n{% endif %}"
    "Tools that can be called:{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}"
    "{% if not (tools and begun and loop.first) %}<|im_start|>{{ message.role }}\n"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ (call.function or call) | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}"
    "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_ZEPHYR = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_ALPACA = (
    "{% for message in messages %}{% if not loop.first %}{{ '\n\n' }}{% endif %}"
    "{% if message.role == 'system' %}{{ message.content }}{% elif message.role == 'user' %}"
    "### Instruction:\n{{ message.content }}{% else %}### Response:\n{{ message.content }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
)
END = "<|end|>"  # of a text, where the template has no end of its own
NAMED = {
    "chatml": ChatTemplate(_CHATML, {"eos_token": "<|im_end|>"}, ("<|im_start|>", "<|im_end|>")),
    "llama-3": ChatTemplate(
        _NO_TOOLS + _LLAMA_3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "zephyr": ChatTemplate(_NO_TOOLS + _ZEPHYR, {"eos_token": END}),
    "alpaca": ChatTemplate(_NO_TOOLS + _ALPACA, {"eos_token": END}),
}
# What a new model gets whose recipe names none.
DEFAULT = "chatml"
