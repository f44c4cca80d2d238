"""Language models: loading, converting and adapting them."""
