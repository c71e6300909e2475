//! The CPU's executor over a drive that is slow or fails: it computes the right mixture whatever happens.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

use forebay_engine::internals::backend::{
    Activation, Backend, Buf, BufShape, CpuBackend, ExpertBlock, Experts, HostMatrix, Matrix, Parts,
    Precision, Router, RouterWeights, Routing, Scores, Weight,
};
use forebay_engine::internals::experts::policy::PolicyKind;
use forebay_engine::internals::experts::{
    BatchShape, ByteRange, ByteSource, CpuExecutor, ExpertExecutor, ExpertLayer, ExpertStore, IoMethod,
    Mixture, NextMixture, PartShape, RowPick, SlotClasses, StoreOptions,
};
use forebay_engine::internals::format::FileIdx;
use forebay_engine::{Error, LayerIdx, Result, TokenId};
use forebay_kernels::DType;
use forebay_testing::assert_same_bits;

const HIDDEN: usize = 32;
const INNER: usize = 16;
const EXPERTS: usize = 8;
const TOP_K: usize = 3;
const LAYERS: usize = 2;

/// The bytes of the file for each part of an expert, so that an offset identifies the part.
const STRIDE: u64 = 8192;

/// The experts' input, three buffers of theirs, logits, the sum, and the buffer of the work done meanwhile.
const WIDTHS: [usize; 7] = [HIDDEN, TOP_K * INNER, TOP_K * INNER, TOP_K * HIDDEN, EXPERTS, HIDDEN, HIDDEN];

const TOKENS: [TokenId; 2] = [TokenId(3), TokenId(1)];

/// A number between -1/4 and 1/4 for each offset in the file.
fn float_at(word: u64) -> f32 {
    let bits = (word + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (bits as f32 / (1 << 24) as f32 - 0.5) / 2.0
}

/// A drive that can be made to fail, and on which one expert may be slower than all others.
#[derive(Default)]
struct Drive {
    fails: AtomicBool,
    /// The expert whose reads wait until this many others of its layer have ended.
    slow: Option<(u64, usize)>,
    others: Mutex<usize>,
    ended: Condvar,
}

impl ByteSource for Drive {
    fn read_at(&self, _: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        if self.fails.load(SeqCst) {
            return Err(io::Error::other("medium error"));
        }
        let expert = offset / STRIDE / 3;
        if let Some((slow, others)) = self.slow {
            let mut ended = self.others.lock().unwrap();
            if slow == expert {
                drop(self.ended.wait_while(ended, |ended| *ended < others).unwrap());
            } else if slow / EXPERTS as u64 == expert / EXPERTS as u64 {
                *ended += 1;
                self.ended.notify_all();
            }
        }
        for (i, byte) in buffer.iter_mut().enumerate() {
            let at = offset + i as u64;
            *byte = float_at(at / 4).to_le_bytes()[at as usize % 4];
        }
        Ok(buffer.len())
    }

    fn path(&self, _: FileIdx) -> &Path {
        Path::new("drive.gguf")
    }
}

fn layers() -> Vec<Option<ExpertLayer>> {
    let shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)];
    let part = |part: usize| PartShape {
        encoding: DType::F32.into(),
        rows: shapes[part].0,
        cols: shapes[part].1,
        planes: [Some(part), None, None],
        pick: RowPick::ALL,
    };
    let range = |layer: usize, expert: usize, part: usize| ByteRange {
        file: FileIdx(0),
        offset: ((layer * EXPERTS + expert) * 3 + part) as u64 * STRIDE,
        len: HIDDEN * INNER * 4,
    };
    let layer = |layer| ExpertLayer {
        parts: Parts { gate: Some(part(0)), up: part(1), down: part(2) },
        adjugate: None,
        experts: (0..EXPERTS).map(|e| [0, 1, 2].map(|part| range(layer, e, part)).into()).collect(),
        used: TOP_K,
    };
    (0..LAYERS).map(|l| Some(layer(l))).collect()
}

/// An executor with activations and a router for each layer.
fn executor(drive: &Arc<Drive>, slots: usize, resident: &[usize]) -> CpuExecutor {
    let layers = layers();
    let classes = SlotClasses::new(&layers);
    let options = StoreOptions {
        slots: vec![slots],
        io: IoMethod::Pool,
        policy: PolicyKind::default(),
        patience: StoreOptions::PATIENCE,
    };
    let source = Arc::clone(drive) as Arc<dyn ByteSource>;
    let store = Arc::new(ExpertStore::over(source, layers, &classes, &options).unwrap());
    let buffers = WIDTHS.map(|width| BufShape { rows: TOKENS.len(), width });
    let mut backend = CpuBackend::new(2, Precision::Exact, &buffers).unwrap();
    for (seed, rows) in [(1, 4), (2, EXPERTS), (3, EXPERTS)] {
        let weights = (0..rows * HIDDEN).flat_map(|i| float_at((seed << 40) + i as u64).to_le_bytes());
        let weights: Vec<u8> = weights.collect();
        let planes = [&weights[..], &[], &[]].map(Into::into);
        let encoding = DType::F32.into();
        let matrix = HostMatrix { encoding, rows, cols: HIDDEN, planes, scale: 1.0 };
        backend.load(Weight::Matrix(matrix)).unwrap();
    }
    let mut executor = CpuExecutor::new(backend, store, true);
    executor.preload(&mut resident.iter().copied(), &mut |_| Ok(())).unwrap();
    executor
}

/// The work that is done while a mixture waits.
fn shared(b: &mut dyn Backend) -> Result<()> {
    b.embed(Matrix::nth(0), &TOKENS, Buf::nth(6, HIDDEN))
}

/// A step of two layers, the second of which reads the output of the first: the sums, and the chosen experts.
fn step(
    executor: &mut CpuExecutor,
    meanwhile: &mut dyn FnMut(&mut dyn Backend) -> Result<()>,
) -> Result<(Vec<f32>, Vec<u32>)> {
    pass(executor, TOKENS.len(), meanwhile)
}

/// Like [`step`], with tokens of several sequences.
fn pass(
    executor: &mut CpuExecutor,
    sequences: usize,
    meanwhile: &mut dyn FnMut(&mut dyn Backend) -> Result<()>,
) -> Result<(Vec<f32>, Vec<u32>)> {
    let [x, gate, up, each, logits, out, other] = std::array::from_fn(|i| Buf::nth(i, WIDTHS[i]));
    let scores = Scores::Softmax;
    let choice = Router {
        experts: EXPERTS,
        top_k: TOP_K,
        scores,
        groups: None,
        normalise: true,
        epsilon: 0.0,
        scale: 1.0,
    };
    let router = |layer: usize| RouterWeights {
        matrix: Matrix::nth(1 + layer),
        bias: None,
        correction: None,
        factors: None,
    };
    let mut chosen = Vec::new();
    executor.begin(BatchShape { rows: TOKENS.len(), sequences })?;
    executor.backend().embed(Matrix::nth(0), &TOKENS, x)?;
    for layer in 0..LAYERS {
        let mut observer = |layer: LayerIdx, routing: &Routing| {
            chosen.extend(routing.experts().iter().map(|e| (layer.0 * EXPERTS) as u32 + e));
        };
        let mixture = Mixture {
            router: &choice,
            weights: router(layer),
            next: (layer + 1 < LAYERS)
                .then(|| NextMixture { layer: LayerIdx(layer + 1), router: router(layer + 1) }),
            input: x,
            logits,
            ready: false,
            experts: Experts {
                layer: LayerIdx(layer),
                x,
                block: ExpertBlock {
                    activation: Activation::SwiGlu,
                    inner: gate,
                    up: Some(up),
                    out: each,
                    biases: None,
                    scales: Parts::default(),
                },
                adjugate: None,
            },
            out,
            observer: Some(&mut observer),
        };
        executor.mixture(mixture, meanwhile)?;
        executor.backend().add(out, other)?;
        executor.backend().add(x, out)?;
    }
    executor.end()?;
    let mut sums = vec![f32::NAN; TOKENS.len() * HIDDEN];
    executor.backend().read(x, &mut sums)?;
    executor.count_used()?;
    Ok((sums, chosen))
}

/// The result of a pass with all experts in memory.
fn truth() -> (Vec<f32>, Vec<u32>) {
    let all: Vec<usize> = (0..LAYERS * EXPERTS).collect();
    step(&mut executor(&Arc::default(), LAYERS * EXPERTS, &all), &mut shared).unwrap()
}

#[test]
fn where_experts_are_and_in_which_order_they_come_changes_no_bit() {
    let (expected, chosen) = truth();
    assert_eq!(chosen.len(), LAYERS * TOP_K * TOKENS.len());
    for (slots, resident) in [(16, 0..0), (16, 0..5), (16, 6..11), (6, 9..16), (2, 3..5), (1, 0..1)] {
        let resident: Vec<usize> = resident.collect();
        let mut executor = executor(&Arc::default(), slots, &resident);
        for _ in 0..2 {
            let (sums, again) = step(&mut executor, &mut shared).unwrap();
            assert_eq!(again, chosen);
            assert_same_bits(&sums, &expected, &format!("{slots} slots, {resident:?} resident"));
        }
    }
    // A prompt's experts are read together; each expert of the first layer in turn is the last to arrive.
    let mut first: Vec<u32> = chosen.into_iter().filter(|&e| (e as usize) < EXPERTS).collect();
    first.sort_unstable();
    first.dedup();
    for &slow in &first {
        let slow = Some((slow.into(), 3 * (first.len() - 1)));
        let drive = Arc::new(Drive { slow, ..Drive::default() });
        let (sums, _) = pass(&mut executor(&drive, LAYERS * EXPERTS, &[]), 1, &mut shared).unwrap();
        assert_same_bits(&sums, &expected, &format!("{slow:?} comes last"));
    }
}

#[test]
fn an_executor_works_again_after_its_drive_failed() {
    let (expected, chosen) = truth();
    let drive = Arc::new(Drive::default());
    // One of the experts that the first layer requests is in memory.
    let mut executor = executor(&drive, LAYERS * EXPERTS, &[chosen[0] as usize]);
    drive.fails.store(true, SeqCst);
    for _ in 0..2 {
        let mut times = 0;
        let error = step(&mut executor, &mut |b| {
            times += 1;
            shared(b)
        });
        let error = error.unwrap_err();
        assert!(matches!(&error, Error::Io { .. }) && error.to_string().contains("drive.gguf"), "{error}");
        assert_eq!(times, 1, "work without experts is done before waiting for them");
    }
    drive.fails.store(false, SeqCst);
    let (sums, again) = step(&mut executor, &mut shared).unwrap();
    assert_eq!(again, chosen);
    assert_same_bits(&sums, &expected, "the drive is repaired");
}

#[test]
fn work_that_fails_meanwhile_ends_only_the_pass() {
    let mut executor = executor(&Arc::default(), 4, &[]);
    let error = step(&mut executor, &mut |_| Err(Error::Backend("it cannot be".into()))).unwrap_err();
    assert!(error.to_string().contains("it cannot be"), "{error}");
    // The slots of its experts are free again.
    assert_same_bits(&step(&mut executor, &mut shared).unwrap().0, &truth().0, "afterwards");
}
