//! Stages that cannot be relied on: their batches fail, and nothing waits for ever.

use forebay_engine::{Engine, Lost, Precision, Stage, StageHost, TokenId, Transport};
use forebay_testing::assert_same_bits;

use crate::common::models::{data, options};

/// Starts again as often as it is asked, and is lost at each batch of more than one token.
struct Hopeless(StageHost, usize);

impl Transport for Hopeless {
    fn call(&mut self, message: &[u8]) -> Result<Vec<u8>, Lost> {
        if message.windows(7).any(|word| word == b"[1,2,3]") {
            return Err(Lost("it always dies here".into()));
        }
        Ok(self.0.handle(message))
    }

    fn restart(&mut self) -> Result<(), Lost> {
        self.1 += 1;
        assert!(self.1 < 10, "it is not started again for ever");
        Ok(())
    }
}

#[test]
fn a_batch_that_always_kills_its_stage_fails_and_others_do_not() {
    let model = data("golden/qwen3moe.gguf");
    let options = options(Precision::Fast);
    let stage = Stage::open(&model, &options.clone().layers(0..2)).unwrap();
    let engine = Engine::after(vec![Box::new(Hopeless(stage.host(), 0))], &model, &options).unwrap();
    let mut session = engine.session();
    let error = session.extend(&[1, 2, 3].map(TokenId)).unwrap_err().to_string();
    assert!(error.contains("layers 0..2 of 3") && error.contains("it always dies here"), "{error}");
    session.extend(&[3, 2, 1].map(TokenId)).unwrap();
    let mut whole = Engine::open(&model, &options).unwrap().session();
    whole.extend(&[3, 2, 1].map(TokenId)).unwrap();
    assert_same_bits(session.logits(), whole.logits(), "another prompt");
}

/// Forgets all conversations before each message: it gets the first one, a greeting, again.
struct Forgetful {
    host: StageHost,
    greeting: Option<Vec<u8>>,
    calls: usize,
}

impl Transport for Forgetful {
    fn call(&mut self, message: &[u8]) -> Result<Vec<u8>, Lost> {
        self.calls += 1;
        assert!(self.calls < 1000, "it is not asked for ever");
        let greeting = self.greeting.get_or_insert_with(|| message.to_vec());
        self.host.handle(greeting);
        Ok(self.host.handle(message))
    }

    fn restart(&mut self) -> Result<(), Lost> {
        Err(Lost("it cannot be started again".into()))
    }
}

#[test]
fn a_stage_that_forgets_at_once_fails_the_batch() {
    let model = data("golden/qwen3moe.gguf");
    let options = options(Precision::Fast);
    let host = Stage::open(&model, &options.clone().layers(0..2)).unwrap().host();
    let stage = Forgetful { host, greeting: None, calls: 0 };
    let mut session = Engine::after(vec![Box::new(stage)], &model, &options).unwrap().session();
    session.push(TokenId(1)).unwrap();
    let error = session.push(TokenId(2)).unwrap_err().to_string();
    assert!(error.contains("layers 0..2 of 3") && error.contains("lacks a conversation"), "{error}");
}
