"""Extensions of TVM for its users: targets, options of a pass context, `tvm.relay`."""
