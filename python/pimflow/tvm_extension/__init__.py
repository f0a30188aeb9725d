"""What the users of TVM find in TVM: targets, options of a pass context, `tvm.relay`."""
