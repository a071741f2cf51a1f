//! Prompts of chat requests against those that transformers renders (`render/make_goldens.py`), byte for byte.

use crate::harness::{Live, Setup};
use oxide_bundle::manifest::ToolDialect;
use serde_json::{Value, json};

const QWEN: &str = include_str!("../../../runtime/text/tests/goldens/qwen2_5.jinja");
const SMOLLM: &str = include_str!("../../../runtime/text/tests/goldens/smollm2.jinja");

fn cases(golden: &str) -> Vec<Value> {
    let golden: Value = serde_json::from_str(golden).expect("JSON");
    let cases = golden["cases"].as_array().expect("cases").clone();
    assert_eq!(cases.len(), 30, "the goldens are whole");
    cases
}

fn render(live: &Live, case: &Value) -> (u16, Value) {
    let reply = live.post("/v1/chat/completions/render", &case["body"]);
    (reply.status, reply.json())
}

fn check_prompt(live: &Live, case: &Value) {
    let (status, body) = render(live, case);
    assert_eq!((status, &body["prompt"]), (200, &case["prompt"]), "{}", case["name"]);
}

#[test]
fn prompts_of_the_shipped_model_are_those_of_transformers_in_text_and_ids() {
    let live = Live::start();
    for case in cases(include_str!("render/oxide-tiny.json")) {
        check_prompt(&live, &case);
        let ids: Vec<u32> = case["tokens"].as_str().expect("ids").split(' ').map(|id| id.parse().expect("an id")).collect();
        assert_eq!(render(&live, &case).1["tokens"], json!(ids), "{}", case["name"]);
    }
}

#[test]
fn prompts_of_qwen_are_those_of_transformers() {
    let live = Setup { template: Some(QWEN), ..Setup::default() }.start();
    cases(include_str!("render/qwen2.5.json")).iter().for_each(|case| check_prompt(&live, case));
}

#[test]
fn prompts_of_smollm_are_those_of_transformers_and_what_its_template_cannot_say_is_refused() {
    let live = Setup { template: Some(SMOLLM), tool_dialect: ToolDialect::None, ..Setup::default() }.start();
    let (mut rendered, mut refused) = (0, 0);
    for case in cases(include_str!("render/smollm2.json")) {
        // The template would leave tools out in silence.
        if case["error"].is_null() && case["body"]["tools"].is_null() {
            check_prompt(&live, &case);
            rendered += 1;
        } else {
            let (status, body) = render(&live, &case);
            assert_eq!((status, &body["error"]["type"]), (400, &json!("invalid_request_error")), "{}: {body}", case["name"]);
            refused += 1;
        }
    }
    assert_eq!((rendered, refused), (14, 16));
}
