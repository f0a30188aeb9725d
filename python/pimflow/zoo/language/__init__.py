"""Language models: decoders as data, their graphs, references and tokens; without TVM."""
