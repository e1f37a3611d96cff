"""Remedies for columns of `schema.TERMS` that a loss needs and a packed directory lacks, for messages."""

REMEDIES = {
    "term_token": "give the rollouts rewards, advantages or log-probabilities and pack them again",
    "term_advantage": "compute them with `treepack advantages`, or give every rollout an advantage, and pack again",
    "trajectory_rewards": "give every rollout a reward and pack them again",
    "term_sampling_logprob": "give every rollout the sampler's log-probabilities and pack them again, or omit "
    "--importance-cap, --importance-mask, --sequence-mask and --old-logprobs",
    "term_old_logprob": "write all of them with `treepack logprobs --column old`",
    "term_ref_logprob": "write them with `treepack logprobs --column ref`",
    "term_teacher_logprob": "write them with `treepack logprobs --column teacher`, or give --teacher MODEL",
    "term_teacher_topk_logprobs": "write them with `treepack logprobs --column teacher --top-k 64`, or give --teacher "
    "MODEL",
    "term_edge_factor": "write them with `treepack advantages --estimator treerpo --edges` and pack again",
    "term_return": "run `treepack advantages --estimator gae` (without a critic: --values zero), and pack again",
    "term_old_value": "compute all of them with `treepack advantages --estimator gae`, or give --value-clip 0",
}
