"""Twelve chat templates of the kinds that models have, in our own words."""

from __future__ import annotations

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "chatml with tools": (
        "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n"
        "<tool_response>{{ message.content }}</tool_response><|im_end|>\n{% else %}<|im_start|>"
        "{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}"
        "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "generation": (
        "{% for message in messages %}{{ message.role }}: "
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ message.content }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "llama 3": (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}"
        "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "llama 2": (
        "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% else %}"
        "{% set loop_messages = messages %}{% set system = '' %}{% endif %}"
        "{% for message in loop_messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0)"
        " %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') "
        "+ message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + ' ' + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ message.content }}{{ eos_token }}{% else %}[INST] {{ message.content }}[/INST]"
        "{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message.role == "
        "'assistant' else message.role %}<start_of_turn>{{ role }}\n{{ message.content | trim }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "phi 3": (
        "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}"
        "{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message.role == 'user' %}\n{{ '<|user|>\n' + "
        "message.content + eos_token }}\n{% elif message.role == 'system' %}\n{{ '<|system|>\n' + "
        "message.content + eos_token }}\n{% else %}\n{{ '<|assistant|>\n' + message.content + "
        "eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n"
        "{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "vicuna": (
        "A chat between a user and an assistant. {% for message in messages %}{% if message.role "
        "== 'user' %}USER: {{ message.content }} {% elif message.role == 'system' %}"
        "{{ message.content }} {% else %}ASSISTANT: {{ message.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    ),
    "alpaca": (
        "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
        "{% elif message.role == 'user' %}{{ '\n\n### Instruction:\n' + message.content }}"
        "{% else %}{{ '\n\n### Response:\n' + message.content + eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
    ),
    "falcon": (
        "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
        "{% if message.role == 'assistant' %}Falcon: {{ message.content }}{{ eos_token }}"
        "{% else %}{{ message.role | capitalize }}: {{ message.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nFalcon: ' }}{% endif %}"
    ),
}
