use crate::support::{folder, golden, run, text};
use oxide_testkit::tiny_bundle;
use serde_json::Value;
use std::fs;

fn sheet() -> String {
    let folder = folder();
    let path = folder.path().join("sheet.html");
    run(&["explain", "-o", text(&path)]).succeeded();
    fs::read_to_string(path).expect("written")
}

#[test]
fn the_sheet_is_one_file_without_script_or_foreign_asset() {
    let sheet = sheet();
    assert!(sheet.starts_with("<!doctype html>"));
    for foreign in ["<script", "http://", "https://", "src=", "@import", "url("] {
        assert!(!sheet.contains(foreign), "{foreign}");
    }
}

#[test]
fn the_sheet_has_a_lane_a_picture_and_a_row_for_everything() {
    let (sheet, inspect) = (sheet(), run(&["inspect", "--json"]).json());
    let list = |name: &str| inspect[name].as_array().expect("a list").clone();
    let steps: u64 = list("entries").iter().filter_map(|entry| entry["steps"].as_u64()).sum();
    let lanes = sheet.split_once("<div class=lanes>").and_then(|(_, rest)| rest.split_once("</div><p class=legend>")).expect("lanes").0;
    assert_eq!(lanes.matches("<i class=").count() as u64, steps);
    assert_eq!(sheet.matches("<svg ").count(), list("entries").len());
    for (index, contract) in list("kernels").iter().filter_map(Value::as_str).enumerate() {
        assert!(sheet.contains(&format!("</i>k{index}</td>")) && sheet.contains(contract), "{contract}");
    }
    assert!(sheet.contains(inspect["seal"].as_str().expect("a seal")));
}

#[test]
fn the_numbers_of_the_sheet_stay() {
    let sheet = sheet();
    let tables: Vec<&str> = sheet.split("<table>").skip(1).filter_map(|rest| rest.split("</table>").next()).collect();
    let words = tables.join("\n").replace("<tr>", "\n").replace("</td>", " | ").replace("</th>", " | ");
    let mut plain = String::new();
    let mut tag = false;
    for c in words.chars() {
        match c {
            '<' => tag = true,
            '>' if tag => tag = false,
            c if !tag => plain.push(c),
            _ => {}
        }
    }
    golden("explain_tables.txt", &plain);
}

#[test]
fn an_unwritable_path_is_refused() {
    let bundle = tiny_bundle();
    run(&["explain", "-o", &format!("{}/no/folder.html", text(&bundle))]).refused(8, &["cannot be written"]);
}
