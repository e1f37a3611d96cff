"""LLM calls of one rollout to trajectories: calls that continue each other become one, other calls one each.

    call 1    prompt P        response a            P a [trained a]
    call 2    prompt P a T    response b      =>    P a T b [trained a and b]      "run-7"
    call 3    prompt Q        response c            Q c [trained c]                "run-7/turn-3"

A call continues a trajectory if its prompt begins with the whole trajectory, token by token (`token_calls`) or message
by message (`chat_calls`). If it continues several, it joins the longest one, so the calls of sub-agents may be
interleaved. Each response is trained once, in the trajectory of its call: if two calls continue the same trajectory,
the second becomes a separate trajectory. A rollout of one trajectory keeps its name. If there are several, each is
named after its first call, and all are in one group: the group of the record, or else a group derived from the first
prompt.

A reader passes a `Record` whose value has only the fields of the rollout besides its calls, under the names that
`rollout_facts.describe` reads (`trajectory_id, group_id, reward, ...`). Any other field becomes metadata or a note
there.

    apis/, spans/     requests and responses of many APIs; spans of tracing systems
    chat_records      a conversation, or a request with its answer, in one record
"""
