"""Parts of `chat_template`: rendering, forms of messages, thoughts, the answer of a turn, and checks of its text."""
