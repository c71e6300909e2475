
// Slot $ is a matrix of experts, whose slots are in the buffers of experts.wgsl.
fn codes$(word: u32) -> u32 { return expert_word(word); }
fn scales$(word: u32) -> u32 { return expert_word(word); }
fn biases$(word: u32) -> u32 { return expert_word(word); }
