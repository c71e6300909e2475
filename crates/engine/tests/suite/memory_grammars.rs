//! Memory of grammars is counted.

use forebay_engine::{Error, Grammar, Options, Request};
use serde_json::json;

use crate::common::memory::measure;
use crate::common::models::random_tokens;
use crate::common::slots::engine_with_slots;

#[test]
fn grammars_share_the_budget_with_experts() {
    let options = || Options::default().context(512);
    let engine = engine_with_slots(12 << 20, options());
    let planned = engine.plan().slot_bytes;
    let tokens = random_tokens(engine.plan().reserved, 4096, 15);
    // All memory that the plan has reserved.
    let mut first = engine.session();
    first.extend(&tokens).unwrap();
    let schema = json!({ "type": "object", "properties": { "a": { "type": "string", "maxLength": 50 } } });
    let before = engine.slot_bytes();
    let (grammar, used) = measure(|| Grammar::json_schema(&engine, &schema).unwrap());
    let taken = before - engine.slot_bytes();
    assert!(taken >= used.kept as u64, "{taken} bytes counted, {} used", used.kept);
    assert!(taken < 3 * used.kept as u64 + (4 << 20), "{taken} bytes counted, {} used", used.kept);
    // The vocabulary is prepared once, so a second grammar needs less than the first.
    let before = engine.slot_bytes();
    let another = Grammar::json_object(&engine).unwrap();
    assert!(before - engine.slot_bytes() < taken);
    drop(another);
    assert_eq!(engine.slot_bytes(), before);
    drop(grammar);
    drop(first);
    assert!(engine.slot_bytes() <= planned);

    // Compiling takes many times the memory of the grammar. It counts too, and is returned.
    let field = |i: usize| {
        (format!("f{i}"), json!({ "type": "string", "pattern": format!("^a{{{}}}(b|c)*$", i % 50) }))
    };
    let patterns = |count| json!({ "type": "object", "properties": (0..count).map(field).collect::<serde_json::Map<_, _>>() });
    let before = engine.slot_bytes();
    drop(Grammar::json_schema(&engine, &patterns(20)).unwrap());
    assert_eq!(engine.slot_bytes(), before);
    match Grammar::json_schema(&engine, &patterns(4000)) {
        Err(Error::Budget { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(engine.slot_bytes(), before);

    // If memory is short, a grammar is refused, and answers without a grammar continue.
    let engine = engine_with_slots(2 << 20, options());
    let mut first = engine.session();
    first.extend(&tokens).unwrap();
    match Grammar::json_object(&engine) {
        Err(error @ Error::Budget { .. }) => {
            assert!(error.to_string().contains("Options::memory"), "{error}")
        }
        other => panic!("{other:?}"),
    }
    let request = Request::new(&engine, tokens[..5].to_vec()).unwrap().max_tokens(3);
    first.generate(&request, &mut |_| {}).unwrap();
}
