"""Language models: text token by token, crossovers of attention and products, figures for other tools."""
