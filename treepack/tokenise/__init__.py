"""Rollouts of text to token ids: chat templates, tokenizers, and the spans of the tokens that the model wrote.

Chat --chat_template, template/--> text of each turn --encoder--> ids --samples, search_turns--> samples of ids

tokenization       all of it for one rollout; file_tokenizer, tokenizer_classes   a tokenizer from its files
control_tokens     special tokens that messages spell out; stable_ids             random ids as numbers
append_only        the sequence that most trainers make of a conversation, which is only counted
"""
