//! Damaged headers never panic the parser, and never make it allocate much more than they have bytes.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use common::gguf_builder::{GgufBuilder, sample, string, tensor_type, value_type};
use forebay_engine::format::{ModelFile, gguf};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

const MUTATIONS: usize = 10_000;

/// What the parser may take beyond the size of the header.
const SLACK: usize = 8 << 20;

#[test]
fn mutations_of_a_small_file_are_harmless() {
    let file = sample().build();
    let model = parse(&file, file.len() as u64).unwrap();
    mutate_headers(&file[..data_start(&model)], file.len() as u64, 1);
}

#[test]
fn mutations_of_a_real_header_are_harmless() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
    let model = ModelFile::open(&path).unwrap();
    let mut header = vec![0; data_start(&model)];
    File::open(&path).unwrap().read_exact(&mut header).unwrap();
    mutate_headers(&header, model.bytes(), 2);
}

/// Lengths and counts that the file is long enough for, over a header that is not.
#[test]
fn claims_within_the_file_allocate_nothing_ahead() {
    let claim = 100u64 << 20;
    for (name, builder) in [
        ("text", GgufBuilder::new().raw("k", value_type::STRING, claim.to_le_bytes())),
        ("bytes", GgufBuilder::new().array("k", value_type::U8, claim, [])),
        ("numbers", GgufBuilder::new().array("k", value_type::U64, claim / 8, [])),
        ("texts", GgufBuilder::new().array("k", value_type::STRING, claim / 8, string(b"a"))),
        ("entries", GgufBuilder::new().claim_entries(gguf::MAX_METADATA_ENTRIES)),
        ("tensors", GgufBuilder::new().claim_tensors(gguf::MAX_TENSORS)),
    ] {
        let file = builder.build();
        let (result, memory) = measure(|| parse(&file, 1 << 40));
        assert!(result.is_err(), "{name}");
        assert!(memory.peak < 1 << 20, "{name}: {memory:?}");
    }
}

/// As many entries and tensors as there may be, each as small as it may be: the worst ratio of memory to file.
#[test]
fn the_most_entries_take_a_bounded_amount() {
    let mut builder = GgufBuilder::new().alignment(1);
    for i in 1..gguf::MAX_METADATA_ENTRIES {
        builder = builder.bool(&format!("{i:x}"), 1);
    }
    for i in 0..gguf::MAX_TENSORS {
        builder = builder.tensor(format!("{i:x}"), tensor_type::F32, &[1], 4);
    }
    let file = builder.build();
    let (model, memory) = measure(|| parse(&file, file.len() as u64));
    assert_eq!(model.unwrap().tensors.len() as u64, gguf::MAX_TENSORS);
    assert!(memory.peak < 24 << 20, "{memory:?} for a file of {}", file.len());
}

/// A large vocabulary, which is what fills real headers.
#[test]
fn a_large_vocabulary_takes_its_own_size() {
    let tokens: Vec<String> = (0..300_000).map(|i| format!("token number {i}")).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let file = GgufBuilder::new().strings("tokenizer.ggml.tokens", &tokens).build();
    let (model, memory) = measure(|| parse(&file, file.len() as u64));
    assert!(model.is_ok());
    assert!(memory.kept < file.len() + 4096, "{memory:?} for a file of {}", file.len());
    // Growing holds the old and the new for a moment.
    assert!(memory.peak < 2 * file.len() + SLACK, "{memory:?} for a file of {}", file.len());
}

fn parse(header: &[u8], len: u64) -> forebay_engine::Result<ModelFile> {
    gguf::parse(Path::new("hostile.gguf"), &mut &*header, len)
}

fn data_start(model: &ModelFile) -> usize {
    model.tensors.iter().map(|t| t.offset).min().unwrap() as usize
}

/// Parses many damaged copies of `header`, which belongs to a file of `len` bytes.
fn mutate_headers(header: &[u8], len: u64, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut copy = Vec::new();
    let mut refused = 0;
    for round in 0..MUTATIONS {
        copy.clear();
        copy.extend_from_slice(header);
        for _ in 0..1 + rng.next_u32() % 3 {
            mutate(&mut copy, &mut rng);
        }
        // Half of the files are as long as the whole one, half end with the header.
        let len = if rng.next_u32().is_multiple_of(2) { len } else { copy.len() as u64 };
        let (result, memory) = measure(|| parse(&copy, len));
        assert!(
            memory.peak <= copy.len() + SLACK && memory.largest <= copy.len() + SLACK / 2,
            "round {round} of seed {seed}: {memory:?} for a header of {}",
            copy.len()
        );
        match result {
            Ok(model) => assert_sound(&model, len),
            Err(error) => {
                refused += 1;
                assert!(error.to_string().len() < 1000, "round {round} of seed {seed}: {error}");
            }
        }
    }
    assert!(refused > MUTATIONS / 4, "only {refused} of {MUTATIONS} mutations did any damage");
}

/// What everyone downstream relies on.
fn assert_sound(model: &ModelFile, len: u64) {
    for tensor in &model.tensors {
        assert!(tensor.offset.checked_add(tensor.len).unwrap() <= len);
        assert!(tensor.elements() > 0 && (1..=4).contains(&tensor.shape.len()));
        assert_eq!(model.tensor(&tensor.name), Some(tensor));
    }
}

fn mutate(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    if bytes.len() < 16 {
        return;
    }
    let at = position(bytes.len(), rng);
    match rng.next_u32() % 7 {
        0 => bytes[at] ^= 1 << (rng.next_u32() % 8),
        1 => bytes[at] = 0,
        2 => bytes[at] = 0xff,
        3 => overwrite(bytes, at, &(extreme(rng) as u32).to_le_bytes()),
        4 => overwrite(bytes, at, &extreme(rng).to_le_bytes()),
        5 => bytes.truncate(at),
        _ => {
            let end = (at + 1 + below(64, rng)).min(bytes.len());
            let range = bytes[at..end].to_vec();
            let to = position(bytes.len(), rng);
            bytes.splice(to..to, range);
        }
    }
}

/// A place to damage. Most of a real header is vocabulary, so its two ends, with the counts and settings and
/// with the tensors, are hit as often as all the rest.
fn position(len: usize, rng: &mut ChaCha8Rng) -> usize {
    let end = len.min(4096);
    match rng.next_u32() % 3 {
        0 => below(end, rng),
        1 => len - 1 - below(end, rng),
        _ => below(len, rng),
    }
}

/// An integer at or beside a boundary that a careless parser forgets.
fn extreme(rng: &mut ChaCha8Rng) -> u64 {
    const BOUNDARIES: [u64; 10] =
        [0, 0xff, 0xffff, 65_536, 1 << 24, 0x7fff_ffff, 0xffff_ffff, 1 << 40, i64::MAX as u64, u64::MAX];
    BOUNDARIES[below(BOUNDARIES.len(), rng)].wrapping_add(rng.next_u64() % 3).wrapping_sub(1)
}

fn overwrite(bytes: &mut [u8], at: usize, with: &[u8]) {
    for (to, from) in bytes[at..].iter_mut().zip(with) {
        *to = *from;
    }
}

fn below(limit: usize, rng: &mut ChaCha8Rng) -> usize {
    (rng.next_u64() % limit as u64) as usize
}

/// The memory that some work on this thread took, in bytes.
#[derive(Clone, Copy, Debug)]
struct MemoryUse {
    /// The most that was live at one time.
    peak: usize,
    /// What the result still holds.
    kept: usize,
    /// The largest single allocation.
    largest: usize,
}

fn measure<T>(work: impl FnOnce() -> T) -> (T, MemoryUse) {
    let before = LIVE.get();
    PEAK.set(before);
    LARGEST.set(0);
    let result = work();
    let since = |bytes: isize| usize::try_from(bytes - before).unwrap_or(0);
    (result, MemoryUse { peak: since(PEAK.get()), kept: since(LIVE.get()), largest: LARGEST.get() })
}

// Each test measures its own thread, on which the parser does all its work.
thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting what the current thread has live. A reallocation is the default one: a new
/// allocation while the old one is still live, which is the worst case.
struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

// SAFETY: every call goes to the system's allocator unchanged; the counters neither allocate nor unwind.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.set(LIVE.get() + layout.size() as isize);
        PEAK.set(PEAK.get().max(LIVE.get()));
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - layout.size() as isize);
        // SAFETY: the caller keeps the contract of `dealloc`, and the pointer came from `System.alloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}
