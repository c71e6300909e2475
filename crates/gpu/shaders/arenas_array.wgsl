
// The buffers that have experts' slots, as an array: the arenas from `args.first` on.

struct Words { words: array<u32> }
@group(0) @binding(#) var<storage, read> arenas: binding_array<Words, WINDOW>;

// The current expert's arena among those that are bound.
var<private> arena: u32;

fn expert_word(word: u32) -> u32 { return arenas[arena].words[word]; }
