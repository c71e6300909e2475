//! A device that is lost while it computes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use forebay_engine::backend::{
    Attention, Backend, Buf, BufShape, CpuBackend, DeltaRule, Device, Experts, HeadMatrices, LayerState,
    Matrix, Part, Ranked, Rope, Router, Routing, StateShape, Vector, Weight,
};
use forebay_engine::experts::Leases;
use forebay_engine::memory::SharedBytes;
use forebay_engine::{
    Answer, Batch, Cancel, ChatRequest, Crowd, CrowdOptions, Driver, DriverOptions, Engine, Error, Event,
    Listener, Options, Precision, Request, Result, TokenId,
};
use forebay_kernels::{Encoding, RopePairs};

use crate::common::models::{demo_model, options};

/// Computes on the processor, and is lost after so many batches.
struct Frail(Arc<AtomicUsize>);

impl Device for Frail {
    fn backend(&self, precision: Precision, buffers: &[BufShape]) -> Result<Box<dyn Backend>> {
        Ok(Box::new(FrailBackend { backend: CpuBackend::new(2, precision, buffers)?, left: self.0.clone() }))
    }

    fn computes(&self, _: Encoding) -> bool {
        true
    }

    fn memory(&self) -> u64 {
        1 << 40
    }

    fn chunk(&self) -> usize {
        64
    }

    fn link_speed(&self) -> Result<f64> {
        Ok(1e9)
    }

    fn pin(&self, _: SharedBytes) -> Result<Box<dyn Send>> {
        Ok(Box::new(()))
    }
}

struct FrailBackend {
    backend: CpuBackend,
    left: Arc<AtomicUsize>,
}

macro_rules! passed_on {
    ($($name:ident($($arg:ident: $kind:ty),*);)*) => {
        $(fn $name(&mut self, $($arg: $kind),*) -> Result<()> {
            self.backend.$name($($arg),*)
        })*
    };
}

impl Backend for FrailBackend {
    fn name(&self) -> String {
        "frail".into()
    }

    fn new_state(&self, shape: StateShape) -> Box<dyn LayerState> {
        self.backend.new_state(shape)
    }

    fn begin(&mut self, rows: usize) {
        self.backend.begin(rows);
    }

    fn submit(&mut self) -> Result<()> {
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::DeviceLost("it fell off the bus".into())),
        }
    }

    passed_on! {
        load(weight: Weight);
        embed(table: Matrix, tokens: &[TokenId], out: Buf);
        rms_norm(x: Buf, w: Vector, eps: f32, out: Buf);
        matmul(x: Buf, products: &[(Matrix, Buf)]);
        head_products(x: Buf, w: &HeadMatrices, out: Buf);
        rope_angles(rope: &Rope, positions: &[u32], out: Buf);
        rope(x: Buf, head_dim: usize, pairs: RopePairs, angles: Buf);
        attention(attention: &Attention, batch: &mut Batch<'_>);
        delta_rule(rule: &DeltaRule, batch: &mut Batch<'_>);
        ungroup(x: Buf, groups: usize, parts: &[Part]);
        route(logits: Buf, router: &Router, correction: Option<Vector>, routing: &mut Routing);
        experts(experts: &Experts, routing: &Routing, leases: Leases);
        combine(routing: &Routing, experts: Buf, out: Buf);
        add(x: Buf, y: Buf);
        add_bias(x: Buf, w: Vector);
        swiglu(gate: Buf, up: Buf);
        sigmoid_gate(x: Buf, gate: Buf);
        pick(x: Buf, rows: &[usize], out: Buf);
        read(x: Buf, out: &mut [f32]);
        read_row(x: Buf, row: usize, out: &mut [f32]);
        best(logits: Buf, k: usize, out: &mut Vec<Ranked>);
    }
}

/// The demo model on a device that takes so many batches.
fn frail(batches: usize) -> Engine {
    let device: Arc<dyn Device> = Arc::new(Frail(Arc::new(AtomicUsize::new(batches))));
    Engine::open(&demo_model(), &Options { device: Some(device), ..options(Precision::Fast) }).unwrap()
}

fn request(engine: &Engine) -> Request {
    let prompt = engine.tokenizer().encode("Once upon a time", Default::default()).unwrap();
    let mut request = Request::new(engine, prompt).unwrap();
    request.sampling.temperature = 0.0;
    request.max_tokens = Some(20);
    request
}

#[test]
fn a_conversation_goes_on_with_a_model_that_is_opened_anew() {
    let engine = frail(8);
    let mut session = engine.session();
    let request = request(&engine);
    let mut told = String::new();
    let mut listen = |event: Event<'_>| {
        if let Event::Text(text) = event {
            told += text;
        }
    };
    let error = session.generate(&request, &mut listen).unwrap_err();
    assert!(matches!(&error, Error::DeviceLost(why) if why.contains("fell off")), "{error:?}");
    assert_eq!(engine.lost(), Some("it fell off the bus"));
    // It is not asked again.
    assert!(matches!(engine.session().extend(&request.prompt), Err(Error::DeviceLost(_))));

    let anew = Engine::open(&demo_model(), &options(Precision::Fast)).unwrap();
    let whole = anew.session().generate(&request, &mut |_| {}).unwrap();
    assert!(!told.is_empty() && whole.text.starts_with(&told), "{told:?}, {:?}", whole.text);
    let tokens = session.tokens();
    assert!(tokens.len() > request.prompt.len());
    let mut rest = anew.session();
    let again = Request { prompt: tokens.to_vec(), ..request.clone() };
    let answer = rest.generate(&again, &mut |_| {}).unwrap();
    let known = tokens.len() - request.prompt.len();
    assert_eq!(answer.tokens[..20 - known], whole.tokens[known..]);
}

struct Ear(mpsc::Sender<Result<Answer>>);

impl Listener for Ear {
    fn event(&mut self, _: Event<'_>) {}

    fn end(self: Box<Self>, answer: Result<Answer>) {
        self.0.send(answer).unwrap();
    }
}

#[test]
fn all_requests_are_told() {
    let engine = frail(5);
    // One of them has to wait for its turn.
    let mut crowd = Crowd::new(&engine, CrowdOptions::new(2));
    let (sender, ended) = mpsc::channel();
    for _ in 0..3 {
        crowd.add(request(&engine), Cancel::default(), Box::new(Ear(sender.clone())));
    }
    while !crowd.is_empty() {
        crowd.step(&Cancel::default()).unwrap();
    }
    let answers: Vec<Result<Answer>> = ended.try_iter().collect();
    assert_eq!(answers.len(), 3);
    assert!(answers.iter().all(|answer| matches!(answer, Err(Error::DeviceLost(_)))), "{answers:?}");
}

#[test]
fn a_driver_tells_of_it_and_takes_nothing_more() {
    let engine = frail(5);
    let driver = Driver::start(&engine, DriverOptions::new(2)).unwrap();
    let ask = || driver.chat(ChatRequest::user("Tell me a story."));
    let streams: Vec<_> = (0..3).map(|_| ask().unwrap()).collect();
    for stream in streams {
        assert!(matches!(stream.last(), Some(Err(Error::DeviceLost(_)))));
    }
    driver.join();
    assert!(matches!(ask().err(), Some(Error::DeviceLost(_))));
}
