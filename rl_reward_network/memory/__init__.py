"""How much memory a run will need: predicted from config.json and the settings, without weights."""
