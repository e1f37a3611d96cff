"""Messages of any program in the form of OpenAI, with the weight, the reasoning and the end of each answer."""
