//! Compares mixtures on the GPU with the CPU's: every activation in every kernel that computes one, adjugate experts,
//! and routers that read something else than the experts.

use std::io;
use std::path::Path;
use std::sync::Arc;

use forebay_engine::internals::backend::{
    Activation, Buf, BufShape, CpuBackend, ExpertBlock, Experts, Matrix, Parts, Precision, Router,
    RouterWeights, Scores, Vector, Weight,
};
use forebay_engine::internals::experts::policy::PolicyKind;
use forebay_engine::internals::experts::{
    BatchShape, ByteRange, ByteSource, CpuExecutor, Device, ExecutorBuilder, ExpertExecutor, ExpertLayer,
    ExpertSetup, ExpertStore, IoMethod, Mixture, PartShape, RowPick, SlotClasses, StoreOptions,
};
use forebay_engine::internals::format::FileIdx;
use forebay_engine::{LayerIdx, TokenId};
use forebay_kernels::{DType, Encoding};
use forebay_testing::relative_error;

use crate::device::{TestDevice, open};
use crate::kernels::matrix;

const WIDTH: usize = 256;
const EXPERTS: usize = 6;
const TOP_K: usize = 2;
/// The experts that share an adjugate expert, and its inner channels.
const GROUP: usize = 3;
const SMALL: usize = 64;
const FACTOR: f32 = 0.5;
const MOST_ROWS: usize = 40;

/// The experts of a file with one layer.
struct Drive(Vec<u8>);

impl ByteSource for Drive {
    fn read_at(&self, _: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        // Whole blocks are read, also at the end.
        let rest = &self.0[offset as usize..];
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    fn path(&self, _: FileIdx) -> &Path {
        Path::new("drive.gguf")
    }
}

/// The settings of a mixture.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    activation: Activation,
    precision: Precision,
    /// Whether all experts are on the device.
    resident: bool,
    /// Whether the router's logits are computed before, and its weights multiply the experts' input.
    early: bool,
    /// The type of adjugate experts' matrices, if there are any.
    adjugate: Option<DType>,
}

impl Case {
    /// Something for each matrix of a block with these inner channels, from its rows and columns.
    fn block<T>(&self, inner: usize, mut make: impl FnMut(usize, usize) -> T) -> Parts<T> {
        let gate = self.activation.is_gated().then(|| make(inner, WIDTH));
        Parts { gate, up: make(inner, WIDTH), down: make(WIDTH, inner) }
    }
}

/// The experts of one layer, whose own matrices are all square.
fn store(case: &Case, classes: &mut Option<SlotClasses>) -> Arc<ExpertStore> {
    let mut bytes = Vec::new();
    let mut ranges = vec![Vec::new(); EXPERTS];
    let mut block = |dtype: DType, inner: usize, sharing: usize| {
        case.block(inner, |rows, cols| {
            let encoding = Encoding::Blocks(dtype);
            for (e, ranges) in ranges.iter_mut().enumerate() {
                if e % sharing == 0 {
                    let seed = bytes.len() as u64;
                    let stored = matrix(encoding, rows, cols, seed).planes[0].to_vec();
                    bytes.push(stored);
                }
                let offset = bytes[..bytes.len() - 1].iter().map(Vec::len).sum::<usize>() as u64;
                ranges.push(ByteRange { file: FileIdx(0), offset, len: bytes[bytes.len() - 1].len() });
            }
            let plane = ranges[0].len() - 1;
            PartShape { encoding, rows, cols, planes: [Some(plane), None, None], pick: RowPick::ALL }
        })
    };
    let parts = block(case.dtype, WIDTH, 1);
    let adjugate = case.adjugate.map(|dtype| block(dtype, SMALL, GROUP));
    let experts = ranges.into_iter().map(Into::into).collect();
    let layers = vec![Some(ExpertLayer { parts, adjugate, experts, used: TOP_K })];
    let classes = classes.insert(SlotClasses::new(&layers));
    let options = StoreOptions {
        slots: vec![EXPERTS],
        io: IoMethod::Pool,
        policy: PolicyKind::default(),
        patience: StoreOptions::PATIENCE,
    };
    let drive = Arc::new(Drive(bytes.concat()));
    Arc::new(ExpertStore::over(drive, layers, classes, &options).unwrap())
}

/// The input, what the router reads, the weighed input, four buffers of experts, logits, and the sum.
const WIDTHS: [usize; 9] =
    [WIDTH, WIDTH, WIDTH, TOP_K * WIDTH, TOP_K * WIDTH, TOP_K * WIDTH, TOP_K * WIDTH, EXPERTS, WIDTH];

fn load(builder: &mut dyn ExecutorBuilder) {
    let floats = Encoding::Blocks(DType::F32);
    let b = builder.backend();
    b.load(Weight::Matrix(matrix(floats, 2 * MOST_ROWS, WIDTH, 50))).unwrap();
    b.load(Weight::Matrix(matrix(floats, EXPERTS, WIDTH, 51))).unwrap();
    b.load(Weight::Vector((0..EXPERTS).map(|i| 0.5 + i as f32).collect())).unwrap();
}

/// The mixture of some rows.
fn mixed(executor: &mut dyn ExpertExecutor, case: &Case, rows: usize) -> Vec<f32> {
    let [x, input, weighed, inner, up, each, small, logits, out] =
        std::array::from_fn(|i| Buf::nth(i, WIDTHS[i]));
    let block = |width: usize, out: Buf| ExpertBlock {
        activation: case.activation,
        inner: inner.narrow(TOP_K * width),
        up: case.activation.is_gated().then(|| up.narrow(TOP_K * width)),
        out,
        biases: None,
        scales: Parts::default(),
    };
    let router = Router {
        experts: EXPERTS,
        top_k: TOP_K,
        scores: Scores::Sigmoid,
        groups: None,
        normalise: true,
        epsilon: 0.1,
        scale: 1.5,
    };
    let weights =
        RouterWeights { matrix: Matrix::nth(1), bias: None, correction: None, factors: Some(Vector::nth(0)) };
    let tokens = |first: usize| (first..first + rows).map(|i| TokenId(i as u32)).collect::<Vec<_>>();
    executor.begin(BatchShape { rows, sequences: 1 }).unwrap();
    let b = executor.backend();
    b.embed(Matrix::nth(0), &tokens(0), x).unwrap();
    b.embed(Matrix::nth(0), &tokens(MOST_ROWS), input).unwrap();
    if case.early {
        weights.logits(b, input, logits).unwrap();
        b.weigh_by_best(x, logits, weighed).unwrap();
    }
    let mixture = Mixture {
        router: &router,
        weights,
        next: None,
        // What is ready is not computed again from what predictions read.
        input: if case.early { x } else { input },
        logits,
        ready: case.early,
        experts: Experts {
            layer: LayerIdx(0),
            x: if case.early { weighed } else { x },
            block: block(WIDTH, each),
            adjugate: case.adjugate.map(|_| (block(SMALL, small), FACTOR)),
        },
        out,
        observer: None,
    };
    executor.mixture(mixture, &mut |_| Ok(())).unwrap();
    executor.end().unwrap();
    let mut sums = vec![f32::NAN; rows * WIDTH];
    executor.backend().read(out, &mut sums).unwrap();
    sums
}

/// The mixtures of one, a few and many rows.
fn results(executor: &mut dyn ExpertExecutor, case: &Case) -> Vec<Vec<f32>> {
    [1, 6, MOST_ROWS].into_iter().map(|rows| mixed(executor, case, rows)).collect()
}

fn assert_equal<D: TestDevice>(case: &Case) {
    let gpu = open::<D>(None);
    let shapes = WIDTHS.map(|width| BufShape { rows: MOST_ROWS, width });
    let mut classes = None;
    let mut cpu = CpuBackend::new(1, Precision::Exact, &shapes).unwrap();
    load(&mut cpu);
    let mut truth = CpuExecutor::new(cpu, store(case, &mut classes), false);
    let truth = results(&mut truth, case);

    let mut builder = gpu.executor(case.precision, &shapes).unwrap();
    load(&mut *builder);
    let store = store(case, &mut classes);
    let setup = ExpertSetup {
        store,
        classes: classes.as_ref().unwrap(),
        device_slots: &[EXPERTS],
        prefetch: false,
        assistant: None,
    };
    let mut executor = builder.build(setup).unwrap();
    if case.resident {
        executor.upload(&mut (0..EXPERTS), &mut |_| Ok(())).unwrap();
    }
    let ours = results(&mut *executor, case);
    let tolerance = if case.precision == Precision::Exact { 1e-5 } else { 3e-3 };
    for (ours, truth) in ours.iter().zip(&truth) {
        let error = relative_error(ours, truth);
        assert!(error < tolerance, "{case:?}, {} rows: {error}", ours.len() / WIDTH);
    }
}

const ACTIVATIONS: [Activation; 7] = [
    Activation::SwiGlu,
    Activation::Clamped { alpha: 1.702, limit: 2.0 },
    Activation::ClippedBefore(2.0),
    Activation::ClippedAfter(1.5),
    Activation::GeGlu,
    Activation::ReGlu,
    Activation::ReluSquared,
];

pub fn every_activation_is_computed_by_every_kernel<D: TestDevice>() {
    for (dtype, precision) in [
        (DType::Q4_K, Precision::Fast),
        (DType::Q8_0, Precision::Fast),
        (DType::F32, Precision::Fast),
        (DType::Q8_0, Precision::Exact),
    ] {
        for activation in ACTIVATIONS {
            assert_equal::<D>(&Case {
                dtype,
                activation,
                precision,
                resident: true,
                early: false,
                adjugate: None,
            });
        }
    }
}

pub fn routers_may_read_something_else_or_have_read_it_before<D: TestDevice>() {
    let activation = Activation::SwiGlu;
    for resident in [false, true] {
        for early in [false, true] {
            for precision in [Precision::Fast, Precision::Exact] {
                let dtype = DType::Q8_0;
                assert_equal::<D>(&Case { dtype, activation, precision, resident, early, adjugate: None });
            }
        }
    }
}

pub fn adjugate_experts_add_to_each_expert_of_their_group<D: TestDevice>() {
    for (dtype, small) in [
        (DType::Q4_K, DType::Q8_0),
        (DType::Q8_0, DType::F32),
        (DType::F32, DType::Q8_0),
        (DType::F32, DType::F32),
    ] {
        for (activation, precision) in
            [(Activation::SwiGlu, Precision::Fast), (Activation::ReluSquared, Precision::Exact)]
        {
            for resident in [false, true] {
                let adjugate = Some(small);
                assert_equal::<D>(&Case { dtype, activation, precision, resident, early: false, adjugate });
            }
        }
    }
}
