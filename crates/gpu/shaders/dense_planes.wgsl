@group(0) @binding(#) var<storage, read> scales_words$: array<u32>;
@group(0) @binding(#) var<storage, read> biases_words$: array<u32>;
fn scales$(word: u32) -> u32 { return scales_words$[word]; }
fn biases$(word: u32) -> u32 { return biases_words$[word]; }
