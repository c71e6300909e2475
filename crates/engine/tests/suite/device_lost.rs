//! A device that is lost during computation.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use forebay_engine::internals::backend::{Backend, BufShape, CpuBackend};
use forebay_engine::internals::experts::{
    BatchShape, CpuExecutor, Device, ExecutorBuilder, ExpertExecutor, ExpertSetup, Meanwhile, Mixture,
};
use forebay_engine::internals::memory::SharedBytes;
use forebay_engine::{
    Answer, Cancel, ChatRequest, Crowd, CrowdOptions, Driver, DriverOptions, Engine, Error, Event, Listener,
    Precision, Request, Result,
};
use forebay_kernels::Encoding;

use crate::common::models::{demo_model, options};

/// Computes on the CPU, and is lost after a number of batches.
struct Frail(Arc<AtomicUsize>);

impl Device for Frail {
    fn executor(&self, precision: Precision, buffers: &[BufShape]) -> Result<Box<dyn ExecutorBuilder>> {
        Ok(Box::new(FrailBuilder { backend: CpuBackend::new(2, precision, buffers)?, left: self.0.clone() }))
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

    fn memory_speed(&self) -> Result<f64> {
        Ok(1e9)
    }

    fn link_speed(&self) -> Result<f64> {
        Ok(1e9)
    }

    fn pin(&self, _: SharedBytes) -> Result<Box<dyn Send>> {
        Ok(Box::new(()))
    }
}

struct FrailBuilder {
    backend: CpuBackend,
    left: Arc<AtomicUsize>,
}

impl ExecutorBuilder for FrailBuilder {
    fn backend(&mut self) -> &mut dyn Backend {
        &mut self.backend
    }

    fn build(self: Box<Self>, experts: ExpertSetup<'_>) -> Result<Box<dyn ExpertExecutor>> {
        let executor = CpuExecutor::new(self.backend, experts.store, experts.prefetch);
        Ok(Box::new(FrailExecutor { executor, left: self.left }))
    }
}

struct FrailExecutor {
    executor: CpuExecutor,
    left: Arc<AtomicUsize>,
}

impl ExpertExecutor for FrailExecutor {
    fn backend(&mut self) -> &mut dyn Backend {
        self.executor.backend()
    }

    fn upload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        self.executor.upload(experts, progress)
    }

    fn preload(
        &mut self,
        experts: &mut dyn Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        self.executor.preload(experts, progress)
    }

    fn lend(&mut self) -> Result<()> {
        self.executor.lend()
    }

    fn begin(&mut self, batch: BatchShape) -> Result<()> {
        self.executor.begin(batch)
    }

    fn mixture(&mut self, mixture: Mixture<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<()> {
        self.executor.mixture(mixture, meanwhile)
    }

    fn end(&mut self) -> Result<()> {
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
            Ok(_) => self.executor.end(),
            Err(_) => Err(Error::DeviceLost("it fell off the bus".into())),
        }
    }

    fn count_used(&mut self) -> Result<()> {
        self.executor.count_used()
    }

    fn forget(&mut self) {
        self.executor.forget();
    }
}

/// The demo model on a device that computes `batches` batches.
fn frail(batches: usize) -> Engine {
    let device: Arc<dyn Device> = Arc::new(Frail(Arc::new(AtomicUsize::new(batches))));
    Engine::open(&demo_model(), &options(Precision::Fast).device(Some(device))).unwrap()
}

fn request(engine: &Engine) -> Request {
    let prompt = engine.tokenizer().encode("Once upon a time", Default::default()).unwrap();
    let mut request = Request::new(engine, prompt).unwrap();
    request.sampling.temperature = 0.0;
    request.max_tokens = Some(20);
    request
}

#[test]
fn a_conversation_continues_with_a_reloaded_model() {
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
    // The device is not used again.
    assert!(matches!(engine.session().extend(&request.prompt), Err(Error::DeviceLost(_))));

    let anew = Engine::open(&demo_model(), &options(Precision::Fast)).unwrap();
    let whole = anew.session().generate(&request, &mut |_| {}).unwrap();
    assert!(!told.is_empty() && whole.text.starts_with(&told), "{told:?}, {:?}", whole.text);
    let tokens = session.tokens();
    assert!(tokens.len() > request.prompt.len());
    let mut rest = anew.session();
    let again = request.clone().prompt(tokens.to_vec());
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
fn all_requests_get_the_error() {
    let engine = frail(5);
    // One of them waits for its turn.
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
fn a_driver_reports_the_loss_and_refuses_requests() {
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
