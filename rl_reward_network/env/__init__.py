"""The prompt-choice environment; it is handed callables and needs neither weights nor a GPU."""
