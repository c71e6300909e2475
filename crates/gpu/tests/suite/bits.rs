//! Attention has the same bits however a conversation is cut into batches, and wherever its state is.

use forebay_device_tests::TestDevice;
use forebay_engine::internals::backend::{
    Attention, Backend, Batch, Buf, BufShape, KvShape, LayerState, Precision, Sequence, SequenceState,
    StateShape, Window,
};
use forebay_engine::internals::experts::Device;
use forebay_engine::{LayerIdx, TokenId};
use forebay_testing::assert_same_bits;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::common::{Best, Plain};

const HEADS: usize = 6;
const TOKENS: usize = 700;

/// Numbers between -2 and 2.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| rng.next_u32() as f32 / (1u32 << 30) as f32 - 2.0).collect()
}

/// Bytes of the memory that is allocated for the first states.
const FIRST_BLOCK: usize = 8 << 20;

/// A state that occupies this much memory.
fn ballast(b: &dyn Backend, bytes: usize) -> Box<dyn LayerState> {
    let mut state = b.new_state(StateShape::Recurrent(bytes / 4));
    let one = 1u64.to_le_bytes();
    let saved = [&one[..], &one, &vec![0x55; bytes]].concat();
    state.load(1, &mut &saved[..]).unwrap();
    state
}

/// Attention's output, computed in batches of these lengths, then token by token, while so many other states fill a
/// block each.
fn attended<D: TestDevice>(kv: KvShape, precision: Precision, lens: &[usize], others: usize) -> Vec<f32> {
    let widths = [HEADS * kv.key_dim, kv.heads * kv.key_dim, kv.heads * kv.value_dim, HEADS * kv.value_dim];
    let shapes = widths.map(|width| BufShape { rows: TOKENS, width });
    let [q, k, v, out] = std::array::from_fn(|i| Buf::nth(i, widths[i]));
    let given = [q, k, v].map(|buf| numbers(TOKENS * buf.width(), buf.index() as u64));
    let device = D::open(None).unwrap();
    let mut executor = device.executor(precision, &shapes).unwrap();
    let b = executor.backend();
    let _others: Vec<_> = (0..others).map(|i| ballast(b, FIRST_BLOCK << i)).collect();
    let mut state = SequenceState::new(0, &[Some(StateShape::Attention(kv))], b);
    let mut results = Vec::new();
    let rest = std::iter::repeat_n(1, TOKENS - lens.iter().sum::<usize>());
    for len in lens.iter().copied().chain(rest) {
        let start = state.len();
        b.begin(len);
        for (buf, given) in [q, k, v].into_iter().zip(&given) {
            b.write(buf, &given[start * buf.width()..(start + len) * buf.width()]).unwrap();
        }
        let positions: Vec<u32> = (start..start + len).map(|position| position as u32).collect();
        let tokens = vec![TokenId(0); len];
        let attention = Attention { layer: LayerIdx(0), q, k, v, out, scale: 0.2, sinks: None };
        let mut sequences = [Sequence { state: &mut state, rows: 0..len }];
        let (tokens, positions) = (&tokens[..], &positions[..]);
        let mut batch = Batch { tokens, positions, stream: None, sequences: &mut sequences };
        b.attention(&attention, &mut batch).unwrap();
        let mut rows = vec![f32::NAN; len * out.width()];
        b.read(out, &mut rows).unwrap();
        results.extend(rows);
        state.settle(start + len);
    }
    results
}

fn assert_cuts_change_no_bit<D: TestDevice>() {
    if !D::is_there() {
        return;
    }
    for window in [None, Some(Window::Last(300)), Some(Window::Chunk(350))] {
        let kv = KvShape { heads: 2, key_dim: 32, value_dim: 20, window, latent: false };
        for precision in [Precision::Fast, Precision::Exact] {
            let whole = attended::<D>(kv, precision, &[TOKENS], 0);
            for lens in [&[300, 399][..], &[2, 63, 3, 500], &[1, 260, 2, 2, 400]] {
                let cut = attended::<D>(kv, precision, lens, 0);
                assert_same_bits(&cut, &whole, &format!("{window:?}, {precision:?}, {lens:?}"));
            }
        }
    }
}

fn assert_places_change_no_bit<D: TestDevice>() {
    if !D::is_there() {
        return;
    }
    let kv = KvShape { heads: 2, key_dim: 32, value_dim: 20, window: None, latent: false };
    for precision in [Precision::Fast, Precision::Exact] {
        let [first, third] = [0, 2].map(|others| attended::<D>(kv, precision, &[400, 297], others));
        assert_same_bits(&third, &first, &format!("{precision:?}"));
    }
}

#[test]
fn places_change_no_bit() {
    assert_places_change_no_bit::<Best>();
}

#[test]
fn places_change_no_bit_without_features() {
    assert_places_change_no_bit::<Plain>();
}

#[test]
fn cuts_change_no_bit() {
    assert_cuts_change_no_bit::<Best>();
}

#[test]
fn cuts_change_no_bit_without_features() {
    assert_cuts_change_no_bit::<Plain>();
}
