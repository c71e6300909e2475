//! Answers: their text, when they end, and the events that the caller receives.

use forebay_engine::chat::{Message, RenderOptions};
use forebay_engine::internals::generate::sampler::SamplingParams;
use forebay_engine::tokenizer::EncodeOptions;
use forebay_engine::{Answer, Engine, Error, Event, FinishReason, Request, Session, TokenId};

use crate::common::engines::{DEMO, STORY, TINY};
use crate::common::tiny_model::{CONTEXT, TOKENS};

fn greedy(engine: &Engine, text: &str) -> Request {
    let prompt = engine.tokenizer().encode(text, EncodeOptions::default()).unwrap();
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    Request::new(engine, prompt).unwrap().sampling(sampling).max_tokens(40)
}

/// A request to the random model, restricted to these tokens.
fn among(tokens: &[&str]) -> Request {
    let bias = tokens.iter().map(|text| (token(text), 1e6)).collect();
    let mut request = greedy(&TINY, "abc a");
    request.sampling = SamplingParams {
        temperature: 1.0,
        top_k: 0,
        min_p: 0.0,
        top_p: 1.0,
        seed: Some(5),
        logit_bias: bias,
        ..SamplingParams::default()
    };
    request
}

/// A token of the random model, by its spelling in the file.
fn token(text: &str) -> TokenId {
    TokenId(TOKENS.iter().position(|t| *t == text).unwrap() as u32)
}

/// The answer of a new session. Asserts that the events' text is the answer's.
fn answer(engine: &Engine, request: &Request) -> Answer {
    answer_in(&mut engine.session(), request)
}

fn answer_in(session: &mut Session, request: &Request) -> Answer {
    let mut heard = String::new();
    let answer = session.generate(request, &mut |event| {
        if let Event::Text(text) = event {
            assert!(!text.is_empty());
            heard += text;
        }
    });
    let answer = answer.unwrap();
    assert_eq!(heard, answer.text);
    assert_eq!(answer.stats.generated_tokens, answer.tokens.len());
    assert_eq!(answer.stats.prompt_tokens, request.prompt.len());
    answer
}

#[test]
fn without_temperature_an_answer_repeats_itself() {
    let request = greedy(&DEMO, STORY);
    let first = answer(&DEMO, &request);
    let second = answer(
        &DEMO,
        &request.clone().sampling(SamplingParams { seed: Some(9), ..request.sampling.clone() }),
    );
    assert_eq!((&first.text, &first.tokens), (&second.text, &second.tokens));
    assert_eq!(first.text, DEMO.tokenizer().decode(&first.tokens, false));
    assert!(first.text.split_whitespace().count() > 20, "{}", first.text);
}

#[test]
fn a_seed_repeats_an_answer_and_another_seed_does_not() {
    let with_seed = |seed| {
        let mut request = greedy(&DEMO, STORY);
        request.sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
        answer(&DEMO, &request.max_tokens(30))
    };
    let first = with_seed(Some(1));
    assert_eq!(first.seed, 1);
    assert_eq!(with_seed(Some(1)).text, first.text);
    assert_ne!(with_seed(Some(2)).text, first.text);
    // A random seed is reported, and repeats the answer as well.
    let made_up = with_seed(None);
    assert_eq!(with_seed(Some(made_up.seed)).text, made_up.text);
}

#[test]
fn as_many_tokens_are_made_as_were_asked_for() {
    for most in [0, 1, 2, 25] {
        let request = among(&["a", "b", "c"]).max_tokens(most);
        let mut session = TINY.session();
        let answer = answer_in(&mut session, &request);
        assert_eq!(answer.tokens.len(), most);
        assert_eq!(answer.finish_reason, FinishReason::Length);
        // The last token is not computed, because no token follows it.
        let computed = &answer.tokens[..most.saturating_sub(1)];
        assert_eq!(session.tokens(), [&request.prompt, computed].concat());
    }
}

#[test]
fn an_end_token_stops_and_is_no_part_of_the_answer() {
    let only_end = answer(&TINY, &among(&["<end>"]));
    assert_eq!((only_end.finish_reason, only_end.tokens.len()), (FinishReason::Stop, 0));
    assert_eq!(only_end.text, "");

    let sometime = answer(&TINY, &among(&["a", "b", "c", "d", "ab", "abc", "<end>"]));
    assert_eq!(sometime.finish_reason, FinishReason::Stop);
    assert!(!sometime.tokens.is_empty() && !sometime.tokens.contains(&token("<end>")));
    assert_eq!(sometime.text, TINY.tokenizer().decode(&sometime.tokens, true));
    // The first token comes from the prompt's logits. The last one was computed, because it led to the end token.
    assert_eq!((only_end.stats.decode_steps, sometime.stats.decode_steps), (0, sometime.tokens.len()));
}

#[test]
fn end_tokens_can_be_ignored() {
    let request = among(&["<end>"]).ignore_end(true);
    let answer = answer(&TINY, &request);
    assert_eq!((answer.finish_reason, answer.tokens.len()), (FinishReason::Length, 40));
    assert_eq!(answer.stats.decode_steps, 39, "the last token is chosen and not computed");
    assert!(!answer.tokens.contains(&token("<end>")));
}

#[test]
fn a_full_context_ends_the_answer() {
    let request =
        |prompt: usize| among(&["a", "b"]).prompt(vec![token("a"); prompt]).max_tokens(None).ignore_end(true);
    let context = CONTEXT as usize;
    for prompt in [1, context - 1, context] {
        let answer = answer(&TINY, &request(prompt));
        assert_eq!((answer.finish_reason, answer.tokens.len()), (FinishReason::Length, context - prompt));
    }
    let limited = answer(&TINY, &request(90).max_tokens(1000));
    assert_eq!((limited.finish_reason, limited.tokens.len()), (FinishReason::Length, 6));
    match TINY.session().generate(&request(context + 1), &mut |_| {}) {
        Err(Error::Context { tokens, limit }) => assert_eq!((tokens, limit), (context + 1, context)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_answer_ends_before_a_stop_string_wherever_tokens_end() {
    let request = greedy(&DEMO, STORY);
    let whole = answer(&DEMO, &request);
    let ends: Vec<usize> =
        (1..=whole.tokens.len()).map(|n| DEMO.tokenizer().decode(&whole.tokens[..n], false).len()).collect();
    let mut cut_by_tokens = 0;
    for start in [3, 20, 41, 70] {
        let stop = whole.text.get(start..start + 9).expect("a longer story in plain letters");
        let first = whole.text.find(stop).unwrap();
        let stopped = answer(&DEMO, &request.clone().stop(vec!["never".into(), stop.into()]));
        assert_eq!(stopped.text, whole.text[..first]);
        assert_eq!(stopped.finish_reason, FinishReason::Stop);
        assert_eq!(stopped.stop.as_deref(), Some(stop));
        // No token is generated after the one that completes the stop string.
        let needed = 1 + ends.iter().position(|&end| end >= first + stop.len()).unwrap();
        assert_eq!(stopped.tokens, whole.tokens[..needed]);
        cut_by_tokens += usize::from(ends.iter().any(|&end| first < end && end < first + stop.len()));
    }
    assert!(cut_by_tokens > 0, "every stop string was a single token");
}

#[test]
fn text_held_back_for_a_stop_string_comes_out_at_the_end() {
    let abc = among(&["abc"]).max_tokens(2);
    let answer_to = |stop: &[&str]| {
        let stop = stop.iter().map(|s| s.to_string()).collect();
        let answer = answer(&TINY, &abc.clone().stop(stop));
        (answer.text, answer.finish_reason)
    };
    assert_eq!(answer_to(&["cabcd"]), ("abcabc".into(), FinishReason::Length));
    assert_eq!(answer_to(&["cab"]), ("ab".into(), FinishReason::Stop));
    // A match is certain only when no longer stop string can still begin before it, such as "bcabcd".
    assert_eq!(answer_to(&["ca", "bcabcd"]), ("ab".into(), FinishReason::Stop));
}

/// Two tokens are one byte each of `é`, and occur in any order.
#[test]
fn characters_are_never_cut() {
    let answer = answer(&TINY, &among(&["Ã", "©"]));
    assert_eq!(answer.text, TINY.tokenizer().decode(&answer.tokens, false));
    assert!(answer.text.contains('é') && answer.text.contains('\u{fffd}'), "{}", answer.text);

    let mut heard = Vec::new();
    let mut hear = |event: Event<'_>| {
        if let Event::Text(text) = event {
            heard.push(text.to_owned());
        }
    };
    TINY.session().generate(&among(&["Ã", "©"]), &mut hear).unwrap();
    let pairs = answer.tokens.windows(2).filter(|pair| *pair == [token("Ã"), token("©")]).count();
    let characters = heard.concat().chars().filter(|&c| c == 'é').count();
    assert_eq!(characters, pairs);
}

#[test]
fn control_tokens_are_no_text() {
    let engine = &*DEMO;
    let start = engine.tokenizer().find("<|im_start|>").unwrap();
    let mut request = greedy(engine, STORY).max_tokens(3);
    request.sampling.logit_bias = vec![(start, 1e6)];
    let answer = answer(engine, &request);
    assert_eq!(answer.tokens, [start; 3]);
    assert_eq!(answer.text, "");
}

#[test]
fn a_conversation_computes_only_what_is_new() {
    let mut session = TINY.session();
    let mut request = among(&["a", "b", "c"]).max_tokens(10);
    let first = answer_in(&mut session, &request);
    assert_eq!(first.stats.reused_tokens, 0);
    let held = request.prompt.len() + 9;
    request.prompt.extend(&first.tokens);
    request.prompt.extend([token("."), token("d")]);
    let second = answer_in(&mut session, &request);
    assert_eq!(second.stats.reused_tokens, held);
    assert_eq!(second.tokens, answer(&TINY, &request).tokens);
}

#[test]
fn a_cancelled_answer_ends_where_it_was() {
    let request = greedy(&DEMO, STORY);
    let whole = answer(&DEMO, &request);
    let mut session = DEMO.session();
    let cancel = session.cancel().clone();
    let mut pieces = 0;
    let cancelled = session.generate(&request, &mut |event| {
        pieces += usize::from(matches!(event, Event::Text(_)));
        if pieces == 5 {
            cancel.cancel();
        }
    });
    let cancelled = cancelled.unwrap();
    assert_eq!(cancelled.finish_reason, FinishReason::Cancelled);
    assert_eq!((pieces, cancelled.tokens.len()), (5, 5));
    assert!(whole.text.starts_with(&cancelled.text));

    // Cancelling works during prompt processing, too. It ends one answer, and the session can be used again.
    let long = request.clone().prompt(request.prompt.repeat(6));
    let cancel = session.cancel().clone();
    let mut prompts = Vec::new();
    let none = session.generate(&long, &mut |event| {
        if let Event::Prompt { done, total } = event {
            prompts.push((done, total));
            cancel.cancel();
        }
    });
    let none = none.unwrap();
    assert_eq!((none.finish_reason, none.text.as_str()), (FinishReason::Cancelled, ""));
    let [(done, total)] = prompts[..] else { panic!("{prompts:?}") };
    assert!(done > 0 && done < total);
    assert_eq!(answer_in(&mut session, &request).tokens, whole.tokens);

    // A cancellation with the last token is too late, but belongs to that answer as well.
    let cancel = session.cancel().clone();
    let mut pieces = 0;
    let ended = session.generate(&request.clone().max_tokens(3), &mut |event| {
        pieces += usize::from(matches!(event, Event::Text(_)));
        if pieces == 3 {
            cancel.cancel();
        }
    });
    assert_eq!(ended.unwrap().finish_reason, FinishReason::Length);
    assert_eq!(answer_in(&mut session, &request).tokens, whole.tokens);
}

#[test]
fn a_request_that_makes_no_sense_is_refused() {
    let sound = || among(&["a"]).max_tokens(3);
    let mut session = TINY.session();
    let mut refusal = |request: Request| match session.generate(&request, &mut |_| {}) {
        Err(error @ (Error::Invalid(_) | Error::Field { .. })) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let sampling = SamplingParams { temperature: -1.0, ..SamplingParams::default() };
    assert!(refusal(sound().sampling(sampling)).contains("temperature"));
    assert!(refusal(sound().stop(vec![String::new()])).contains("stop string"));
    assert!(refusal(sound().prompt(vec![])).contains("no tokens"));
    assert!(refusal(sound().prompt(vec![TokenId(1000)])).contains("token 1000"));
    assert_eq!(answer_in(&mut session, &sound()).text, "aaa");
}

#[test]
fn the_demo_model_tells_a_story_and_ends_it() {
    let engine = &*DEMO;
    let template = engine.template().unwrap().expect("the demo model has a template");
    let messages = [Message::new("user", "Tell me a story about a cat and a boat.")];
    let render = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let text = template.render(&messages, &render).unwrap();
    let options = EncodeOptions { special: true, ..EncodeOptions::default() };
    let prompt = engine.tokenizer().encode(&text, options).unwrap();
    let story = answer(engine, &greedy(engine, "").prompt(prompt).max_tokens(400));
    assert_eq!(story.finish_reason, FinishReason::Stop, "{}", story.text);
    assert_eq!(story.finish_reason.name(), "stop");
    let text = &story.text;
    assert!(text.contains("boat") && text.len() > 200, "{text}");
    assert!(!text.contains("<|") && !text.contains('\u{fffd}'), "{text}");
    assert!(story.tokens.iter().all(|token| !engine.tokenizer().end_tokens().contains(token)));
    let stats = story.stats;
    assert!(0.0 < stats.prompt_seconds && stats.prompt_seconds <= stats.ttft_seconds);
    assert!(stats.decode_seconds > 0.0);
}
