"""Write the sample data: python sample_data/make.py [DIRECTORY], by default the directory of this script.

    workshop.py --logs--> text --learn--> tokenizer/
                  |
                  +--> chat.jsonl (messages)   tokens.jsonl (ids)   search_tree.json   tiny-qwen3.json

Everything is made up, and a second run writes the same bytes. The vocabulary is learnt from the very text that
is written. The log-probabilities in tokens.jsonl come from a hash of the tokens before, not from a model. What happens
in a rollout is workshop.py's.
"""

import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from workshop import Json, fork_tree, make_case, tool_schemas

# At most: the text runs out of pairs to merge at about 1,460.
MAX_VOCAB_SIZE = 2000
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NUM_TASKS, NUM_TRIALS = 8, 4
NUM_PROMPTS, NUM_SAMPLES = 4, 8

# Reasoning is rendered only after the last user message: a new one takes the older reasoning out of the text.
CHAT_TEMPLATE = """\
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- set first = messages[0].content if messages and messages[0].role == 'system' else none %}
{%- if first is not none or tools %}
    {{- '<|im_start|>system\\n' + (first or '') }}
    {%- if tools %}
        {{- ('\\n\\n' if first else '') + 'You may call these tools:\\n<tools>' }}
        {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
        {{- '\\n</tools>\\nCall one with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content and loop.index0 > ns.last_user %}
            {{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {%- set f = call.function or call %}
            {{- '\\n' if m.content or not loop.first }}
            {{- '<tool_call>{"name": ' + (f.name | tojson) + ', "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif m.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

SEARCH_QUERY = (
    "The derailleur hanger of my Corrib Tourer (2021) has snapped. Find one that fits, for less than 30 euro with "
    "postage, delivered to postcode 4417 by Friday 14 March."
)
SEARCH_SYSTEM = (
    "You solve the task with the functions below, one call at a time. At every step, first think about the state, "
    "then call a function. When a branch leads nowhere, give it up and restart from an earlier state. End with Finish."
)
SEARCH_RETRY = (
    "You have been in this state before. Here is what you tried:\n{}\nThink again, and do something different."
)
# name|description|parameters
SEARCH_FUNCTIONS = """\
hanger_for_framefit|Hanger codes that fit a frame of a given year.|frame;year
search_for_partsyard|Offers for a part, cheapest first.|query
offer_for_partsyard|Price, seller and origin of one offer.|offer_id
delivery_for_swiftpost|Postage and arrival day of a small parcel.|origin;postcode;service
Finish|End with an answer, or give up and restart.|return_type;final_answer"""
# function|arguments|observation code|observation|thought. In each block the last line succeeds, the others fail.
SEARCH_MOVES = """\
hanger_for_framefit|Corrib;2021|0|{"error": "no frame named 'Corrib'"}|
hanger_for_framefit|Corrib Touring;2021|0|{"error": "no frame named 'Corrib Touring'"}|Perhaps the name is longer.
hanger_for_framefit|Corrib Tourer;2021|0|{"codes": ["DH-118", "DH-118B"]}|The full model name must be used.

search_for_partsyard|derailleur hanger|0|{"offers": [{"offer_id": "P-20", "title": "DH-044"}], "total": 914}|
search_for_partsyard|hanger Corrib|12|{"error": "rate limit, wait 60 s"}|Far too many. The brand narrows them down.
search_for_partsyard|hanger 2021|0|{"offers": [], "total": 0}|The limit is over; the year may do as well.
search_for_partsyard|DH-118|0|{"offers": [{"offer_id": "P-71"}, {"offer_id": "P-88"}], "total": 2}|I search by the code.

offer_for_partsyard|P-71|0|{"price": 34.5, "seller": "Alpenrad", "origin": "2210", "left": 3}|
offer_for_partsyard|P-17|1|{"error": "offer P-17 does not exist"}|34.50 is too dear. I look at another offer.
offer_for_partsyard|P-88|0|{"price": 19.9, "seller": "Veloteca", "origin": "4030"}|P-71 is too dear for me.

delivery_for_swiftpost|4030;4417;economy|0|{"postage": 3.2, "arrives": "2025-03-18"}|
delivery_for_swiftpost|4030;4417;night|11|{"error": "no such service: night"}|Tuesday is too late. A night service?
delivery_for_swiftpost|4030;4417;standard|0|{"postage": 5.6, "arrives": "2025-03-13"}|Economy is too slow."""
GIVE_UP = 'Finish|give_up_and_restart|4|{"response": "chose to give up and restart"}|I do not see how this goes on.'
ANSWER = (
    "Finish|give_answer;Offer P-88 by Veloteca: hanger DH-118 for 19.90, standard post 5.60, there on 13 March."
    '|3|{"response": "successfully giving the final answer."}|19.90 + 5.60 = 25.50 euro, on Thursday. That will do.'
)


def dumps(value: Any) -> str:
    """One line of JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def chat_rows() -> list[Json]:
    """The rows of chat.jsonl. Task 2 ends with a copy of its trial 1, task 5 with its trial 0 cut off."""
    rows = []
    tools = tool_schemas()
    for task in range(NUM_TASKS):
        logs = list(fork_tree(make_case(f"desk-{task}", task), NUM_TRIALS, whole=True))
        trials = [(log.messages, max(0.0, 1.0 - 0.5 * log.num_mistakes)) for log in logs]
        if task == 2:
            trials[3] = trials[1]
        if task == 5:
            whole = trials[0][0]
            trials[3] = (whole[: max(i for i, m in enumerate(whole) if m.get("tool_calls")) + 1], 0.0)
        for trial, (messages, reward) in enumerate(trials):
            task_id = f"desk-{task:03}"
            rows.append({"task_id": task_id, "trial": trial, "reward": reward, "messages": messages, "tools": tools})
    return rows


def token_rows(tokenizer: Any) -> list[Json]:
    """The rows of tokens.jsonl: text up to the quote (one user message), tokenised piece by piece as a sampler sees it.

    The mask is 1 on what the model wrote, up to and with <|im_end|>; masked positions have log-probability 0.0.
    """
    rows = []
    options = {"tools": tool_schemas()[:3], "tokenize": False}

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    for prompt in range(NUM_PROMPTS):
        uid = f"estimate-{prompt}"
        group = []
        for log in fork_tree(make_case(uid, NUM_TASKS + prompt), NUM_SAMPLES, whole=False):
            turns = [i for i, m in enumerate(log.messages) if m["role"] == "assistant"]
            start = tokenizer.apply_chat_template(log.messages[: turns[0]], add_generation_prompt=True, **options)
            done, ids, mask = start, list[int](), list[int]()
            for turn in turns:
                asked = tokenizer.apply_chat_template(log.messages[:turn], add_generation_prompt=True, **options)
                said = tokenizer.apply_chat_template(log.messages[: turn + 1], **options).removesuffix("\n")
                for text, trained in ((asked[len(done) :], 0), (said[len(asked) :], 1)):
                    piece = encode(text)
                    ids += piece
                    mask += [trained] * len(piece)
                done = said
            row = {"uid": uid, "step": 40 + prompt // 2, "prompt_ids": encode(start), "response_ids": ids}
            group.append(row | {"response_mask": mask, "reward": max(0.0, 1.0 - 0.5 * log.num_mistakes)})
        for row, values in zip(group, log_probs(group), strict=True):
            rows.append(row | {"rollout_log_probs": values})
    return rows


def log_probs(group: Sequence[Json]) -> list[list[float]]:
    """Log-probabilities that one sampler could have given: equal on shared tokens, and siblings sum to at most 1.

    Mostly near 0 with a heavy tail, drawn from a hash of the tokens so far; ln(children) less where the group forks.
    """
    children: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for row in group:
        for i, token in enumerate(row["response_ids"]):
            children[tuple(row["response_ids"][:i])].add(token)
    rows = []
    for row in group:
        values = []
        digest = hashlib.sha256(row["uid"].encode())
        for i, (token, trained) in enumerate(zip(row["response_ids"], row["response_mask"], strict=True)):
            digest.update(token.to_bytes(4, "little"))
            uniform = (int.from_bytes(digest.digest()[:4], "little") + 1) / 2**32
            forks = len(children[tuple(row["response_ids"][:i])])
            value = -0.02 * math.log(uniform) ** 2 - 0.001 - math.log(forks)
            values.append(round(value, 3) if trained else 0.0)
        rows.append(values)
    return rows


def search_schemas() -> list[Json]:
    schemas = []
    for line in SEARCH_FUNCTIONS.splitlines():
        name, description, keys = line.split("|")
        properties = {key: {"type": "string", "description": ""} for key in keys.split(";")}
        required = [key for key in properties if key != "final_answer"]
        optional = [key for key in properties if key == "final_answer"]
        parameters = {"type": "object", "properties": properties, "required": required, "optional": optional}
        schemas.append({"name": name, "description": description, "parameters": parameters})
    return schemas


def search_arguments(function: str, values: str) -> str:
    lines = [line.split("|") for line in SEARCH_FUNCTIONS.splitlines()]
    keys = next(keys for name, _, keys in lines if name == function).split(";")
    return json.dumps(dict(zip(keys, values.split(";"), strict=False)), indent=2)


def search_turn(move: str, children: list[Json], *, pruned: bool = False) -> Json:
    """The nodes of one turn, each the only child of the one before: a Thought if there is one, Action, Action Input."""
    function, values, code, observation, thought = move.split("|")
    result = {"observation": observation, "observation_code": int(code)}
    arguments = search_arguments(function, values)
    node = {"node_type": "Action Input", "description": arguments, "pruned": pruned, "children": children} | result
    node = {"node_type": "Action", "description": function, "pruned": False, "children": [node]}
    return {"node_type": "Thought", "description": thought, "pruned": False, "children": [node]} if thought else node


def search_failure(moves: list[str]) -> Json:
    """A subtree with as many leaves as moves: each move but the last leads to the next one and to giving up."""
    if len(moves) == 1:
        return search_turn(moves[0], [], pruned=True)
    return search_turn(moves[0], [search_failure(moves[1:]), search_turn(GIVE_UP, [], pruned=True)])


def search_nodes(node: Json, depth: int, *, finished: bool) -> Json:
    """The node as the search writes it; the path that finished is the last child of the last child."""
    last = len(node["children"]) - 1
    children = [search_nodes(c, depth + 1, finished=finished and i == last) for i, c in enumerate(node["children"])]
    kept: Json = {key: node[key] for key in ("observation", "observation_code") if key in node}
    return {
        "is_terminal": False,
        "pruned": node["pruned"],
        "finished": finished,
        "depth": depth,
        "node_type": node["node_type"],
        "description": node["description"],
        "Elo": 1000.0,
        **kept,
        "child_count": len(children),
        "children": children,
    }


def search_tree() -> Json:
    """search_tree.json: a depth-first search of beam 2 and 10 leaves, and the training messages of its winning path."""
    levels = [block.splitlines() for block in SEARCH_MOVES.split("\n\n")]
    children = [search_turn(ANSWER, [])]
    for moves in reversed(levels):
        children = [search_failure(moves[:-1]), search_turn(moves[-1], children)]
    root = {"node_type": "Action Input", "description": "", "pruned": False, "children": children}
    messages: list[Json] = [{"role": "system", "content": SEARCH_SYSTEM}, {"role": "user", "content": SEARCH_QUERY}]
    train_messages = []
    for moves in [*levels, [ANSWER]]:
        if len(moves) > 1:
            tried = "\n".join(" ".join(move.split("|")[:2]) for move in moves[:-1])
            messages.append({"role": "user", "content": SEARCH_RETRY.format(tried), "valid": False})
        function, values, _, observation, thought = moves[-1].split("|")
        call = {"name": function, "arguments": search_arguments(function, values)}
        messages.append({"role": "assistant", "content": thought, "function_call": call})
        train_messages.append(list(messages))
        messages.append({"role": "function", "name": function, "content": observation})
    answer = {
        "valid_data": True,
        "final_answer": train_messages[-1][-1]["function_call"]["arguments"],
        "finish_type": "give_answer",
        "query": SEARCH_QUERY,
        "function": search_schemas(),
        "chain": [],
        "train_messages": train_messages,
    }
    return {"win": True, "tree": {"tree": search_nodes(root, 0, finished=True)}, "answer_generation": answer}


def write_tokenizer(directory: Path, texts: list[str]) -> Any:
    """Learn the vocabulary from the texts and write the four files AutoTokenizer reads; digits stay single."""
    tokenizer = Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
    }
    write(directory / "tokenizer.json", dumps(json.loads(tokenizer.to_str())) + "\n")
    write(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    write(directory / "chat_template.jinja", CHAT_TEMPLATE)
    return AutoTokenizer.from_pretrained(directory)


def texts_of(rows: list[Json]) -> list[str]:
    """What the vocabulary is learnt from: schemas, messages, calls and the marks around them."""
    texts = [json.dumps(tool) for tool in rows[0]["tools"]] * NUM_TASKS
    for message in (message for row in rows for message in row["messages"]):
        texts += [f"{message['role']}\n", message["content"] or "", message.get("reasoning_content", "")]
        texts += ["<think>\n", "\n</think>\n\n", "<tool_response>\n", "\n</tool_response>"]
        for call in message.get("tool_calls", []):
            function = call["function"]
            texts.append(
                f'<tool_call>{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}</tool_call>'
            )
    return texts


def model_config(tokenizer: Any) -> Json:
    """A Qwen3 of about a million parameters: a few training steps take seconds on a CPU."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    rows = chat_rows()
    tokenizer = write_tokenizer(directory / "tokenizer", texts_of(rows))
    write(directory / "chat.jsonl", "".join(dumps(row) + "\n" for row in rows))
    write(directory / "tokens.jsonl", "".join(dumps(row) + "\n" for row in token_rows(tokenizer)))
    write(directory / "search_tree.json", json.dumps(search_tree(), indent=1) + "\n")
    write(directory / "tiny-qwen3.json", json.dumps(model_config(tokenizer), indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
