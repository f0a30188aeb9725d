"""Being written right now by the session that also fixed recognise_clip, sink_layout and outline_pim."""
