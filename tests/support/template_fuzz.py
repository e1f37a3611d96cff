"""Random chat templates that depend on everything that a template can see, and conversations for them.

A template is a head, a loop over messages and a tail, each of a few fragments. Nearly all of them are templates that no
model has: they depend on counts, on the end of the conversation, on namespaces, or are refused in the middle.
"""

from __future__ import annotations

import random
from typing import Any

Message = dict[str, Any]

NAMESPACE = "{%- set ns = namespace(a=-1, b='', flag=true, n=messages|length, m=none) %}"
MACRO = "{%- macro show(m) %}[{{ m.content }}{{ ns.b }}{{ messages[0].role }}]{% endmacro %}"
HEADS = [
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.a = loop.index0 %}{% endif %}{% endfor %}",
    "{%- for m in messages[::-1] %}{%- set i = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.flag and m.role == 'user' %}{%- set ns.flag = false %}{%- set ns.a = i %}{%- endif %}{%- endfor %}",
    "{%- for m in messages[::-1] %}{%- if m.role == 'user' %}{%- set ns.a = loop.index0 %}{%- endif %}{%- endfor %}",
    "{%- for m in messages[::-1] %}{%- if m.role == 'user' %}{%- set ns.b = ns.b ~ m.content ~ ns[m.role] %}"
    "{%- endif %}{%- endfor %}",
    "{%- for m in messages[::-1] %}{%- if loop.last %}{%- set ns.a = messages|length - loop.index %}{%- endif %}"
    "{%- if m.role == 'user' %}{% break %}{% endif %}{%- endfor %}",
    "{%- for m in messages[::-1] %}{{ m.role[0] if loop.first }}{% endfor %}",
    "{%- for m in messages %}{{ m.role[0] }}{% endfor %}|",
    "{%- for m in messages %}{% if m.role == 'tool' %}{% set ns.b = ns.b + m.content %}{% endif %}{% endfor %}"
    "{{ ns.b }}",
    "{%- if messages[0].role == 'system' %}S{{ messages[0].content }}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}",
    "{%- set last = messages[-1].role %}",
    "{%- set users = messages|selectattr('role', 'equalto', 'user')|list %}",
    "{%- set lazy = messages|map(attribute='role') %}",
    "{%- set ns.m = messages[1:] %}",
    "{%- set half = (messages|length) // 2 %}",
    "{%- if messages|length > 3 %}{%- set ns = namespace(a=1, b='x', flag=false, n=0) %}{%- endif %}",
    "{{- bos }}",
    "{%- if add_generation_prompt %}{%- set ns.b = 'p' %}{%- endif %}",
    "{%- set ns.a = (messages|length) - 2 %}",
    "{{- raise_exception('too long') if messages|length > 6 }}",
]
LOOPS = ["messages", "messages", "messages", "rest", "messages[1:]", "messages[:-1]", "messages[::-1]", "ns.m"]
BODIES = [
    "{{ m.role }}:{{ m.content }};",
    "{% if loop.last %}L{% endif %}",
    "{% if not loop.last and loop.nextitem.role == 'tool' %}T{% endif %}",
    "{% if loop.index0 > ns.a %}R{{ m.content }}{% endif %}",
    "{% if ns.a <= loop.index0 %}r{% endif %}",
    "{% if ns.a >= loop.index %}q{% else %}Q{% endif %}",
    "{% if ns.a < ns.n %}c{% endif %}",
    "{% if 2 > ns.a and ns.a > 0 %}t{% endif %}",
    "{% if ns.a == loop.index0 %}={% endif %}",
    "{% if loop.index0 != ns.a %}#{% endif %}",
    "{{ loop.revindex }}",
    "{{ ns.a }}",
    "{{ messages[loop.index0 + 1].role if not loop.last }}",
    "{{ messages[loop.index0 + 2].role }}",
    "{{ messages[loop.index0 - 1].role }}",
    "{{ messages[-1].content }}",
    "{{ messages|length }}",
    "{{ loop.length }}",
    "{% set ns.b = ns.b ~ m.role[0] %}",
    "{% set ns.a = ns.a + 1 %}",
    "{% set ns.a = loop.index0 if m.role == 'user' else ns.a %}",
    "{{ ns.b }}",
    "{% if loop.index0 % 2 %}o{% endif %}",
    "{% for x in messages[loop.index:] %}{{ x.role[0] }}{{ loop.last }}{% endfor %}",
    "{% for x in messages %}{% if loop.index0 > 2 %}{% break %}{% endif %}{{ x.role[0] }}{% endfor %}",
    "{% for c in m.content %}{{ loop.index }}{% set ns.flag = not ns.flag %}{% endfor %}",
    "{% generation %}g{{ m.content }}{% if loop.last %}!{% endif %}{% endgeneration %}",
    "{{ show(m) }}",
    "{% if add_generation_prompt %}G{% endif %}",
    "{{ last }}",
    "{{ users|length }}",
    "{{ half > loop.index0 }}",
    "{{ lazy|first }}",
    "{{ loop.cycle('x', 'y', 'z') }}",
    "{{ loop.previtem.role if loop.previtem is defined }}",
    "{% if m.content == 'stop' %}{% break %}{% endif %}",
    "{% if m.content == 'skip' %}{% continue %}{% endif %}",
    "{{ raise_exception('no') if m.content == 'bad' }}",
    "{{ raise_exception('no end') if loop.last and m.role == 'tool' }}",
    "{{ loop.changed(m.role) }}",
    "{% set inner = namespace(z=1) %}{% set inner.z = inner.z + ns.n %}{{ inner.z }}",
    "{% set ns.inner = namespace(z=loop.index0) %}{{ ns.inner.z }}",
    "{% set ns.m = m %}",
    "{{ ns.m.role }}",
    "{% set ns.many = (ns.many or []) + [m.role] %}{{ ns.many|length }}",
    "{{ messages is sequence }}",
    "{{ (messages|first).role }}{{ (messages|last).role }}",
    "{{ messages|map(attribute='role')|join }}",
    "{{ messages|tojson|length }}",
    "{{ ns }}",
    "{{ m is sameas messages[0] }}",
    "{{ ns.missing is defined }}{{ ns.n is number }}",
    "{% if messages %}y{% endif %}",
    "{% if m in messages %}i{% endif %}",
    "{{ [1, 2][ns.a] }}",
    "{{ messages[ns.a].role }}",
    "{{ ns.a * 2 }}",
    "{% set loop_count = loop.index %}{{ loop_count }}",
    "{% if m.role == 'user' %}{% set half = 0 %}{% endif %}{{ half }}",
    "{% if tools %}{{ tools[0].name }}{% endif %}",
    "{{ strftime_now('%Y') }}",
    "{{ loop }}",
    "{{ loop.nosuch }}",
    "{% for x in m.content if x != loop.last %}{{ x }}{% endfor %}",
    "{{ messages[1:]|length }}",
    "{% if messages[3:] %}3{% endif %}",
    "{{ messages[3:][0].role }}",
]
TAILS = [
    "{%- if add_generation_prompt %}<a>{% endif %}",
    "{%- if add_generation_prompt and not ns.flag %}<f>{% endif %}",
    "{{- ns.b }}",
    "{{- ns.a }}",
    "{{- messages[-1].role }}",
    "{%- for m in messages %}{{ loop.index0 - ns.a }}{% endfor %}",
]
ROLES = ["user", "assistant", "tool", "user", "assistant", "system"]
CONTENTS = ["a", "bc", "", "d\n", "stop", "skip", "bad", "e", "f", "g", "h", "i", "j", "k", "l", "m"]


def random_template(seed: int) -> str:
    """Return a template."""
    choose = random.Random(seed)
    heads = choose.sample(HEADS, choose.randrange(4))
    bodies = choose.sample(BODIES, choose.randrange(1, 5))
    tails = choose.sample(TAILS, choose.randrange(3))
    loop = "{%- for m in " + choose.choice(LOOPS) + " %}{{ m.content }}" + "".join(bodies) + "{% endfor %}"
    return "".join([NAMESPACE, MACRO, *heads, loop, *tails])


def random_messages(seed: int, number: int = 9) -> list[Message]:
    """Return messages of any roles in any order."""
    choose = random.Random(seed)
    roles = [choose.choice(ROLES) for _ in range(number)]
    return [{"role": role, "content": choose.choice(CONTENTS)} for role in roles]
