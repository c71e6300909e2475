
// Slot $ is a dense matrix in buffers of its own.
@group(0) @binding(#) var<storage, read> codes_words$: array<u32>;
fn codes$(word: u32) -> u32 { return codes_words$[word]; }
