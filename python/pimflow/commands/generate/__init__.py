"""Language models: text token by token, figures for other tools."""
