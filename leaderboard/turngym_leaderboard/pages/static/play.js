// The playground: keys, turns of several actions, and pages that change in place. Without it every button is a form.
"use strict";

document.documentElement.classList.add("js");

let queue = [];

const find = (selector) => document.querySelector(selector);

// Buttons collect a turn where it may have several actions; else each of them plays one.
const collects = () => find(".queued") !== null;

const draw = () => {
  const queued = find(".queued");
  if (!queued) return;
  queued.hidden = false;
  const list = queued.querySelector("ol");
  list.replaceChildren(
    ...queue.map((choice) => {
      const item = document.createElement("li");
      const button = find(`.choices [value="${choice}"]`);
      item.textContent = button.firstChild.textContent.trim();
      return item;
    }),
  );
  queued.querySelector(".send").disabled = queue.length === 0;
  queued.querySelector(".undo").disabled = queue.length === 0;
  const most = Number(find("#turn").dataset.most);
  for (const button of document.querySelectorAll(".choices button")) button.disabled = most > 0 && queue.length >= most;
};

const filledIn = ["#reasoning", "#written"];

// Puts the page as it now stands in this one's place. What was filled in stays while the turn is the same.
const swap = (text) => {
  const step = find("[name=step]")?.value;
  const drafts = filledIn.map((field) => find(field)?.value ?? "");
  const page = new DOMParser().parseFromString(text, "text/html");
  find("main").replaceWith(page.querySelector("main"));
  document.title = page.title;
  if (step === undefined || find("#turn [name=step]")?.value !== step) queue = [];
  else filledIn.map(find).forEach((field, at) => field && (field.value ||= drafts[at]));
  draw();
  const field = find("#written");
  if (field) field.focus();
  else find(".status")?.focus({ preventScroll: true });
};

const fail = (told) => {
  const notice = document.createElement("p");
  notice.className = "notice";
  notice.textContent = told;
  find(".status").replaceChildren(notice);
};

const send = async (form, submitter) => {
  const main = find("main");
  if (main.ariaBusy === "true") return;
  const fields = new URLSearchParams(new FormData(form, submitter));
  if (form.id === "turn" && submitter?.name !== "use") for (const choice of queue) fields.append("choice", choice);
  main.ariaBusy = "true";
  try {
    const answer = await fetch(form.action, { method: "POST", body: fields });
    const there = new URL(answer.url).pathname;
    if (answer.redirected && there !== location.pathname) location.assign(there);
    else swap(await answer.text());
  } catch {
    main.ariaBusy = "false";
    fail("The playground does not answer. It may have been stopped; the turn can be sent again.");
  }
};

document.addEventListener("submit", (event) => {
  event.preventDefault();
  const { submitter } = event;
  if (submitter?.name === "choice" && collects()) {
    queue.push(submitter.value);
    draw();
  } else send(event.target, submitter);
});

document.addEventListener("click", (event) => {
  if (event.target.closest(".undo")) {
    queue.pop();
    draw();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
  const field = event.target.closest("textarea, input");
  if (field) {
    if (event.key === "Escape") field.blur();
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      field.form.requestSubmit(field.form.querySelector(".send, [type=submit]") ?? undefined);
    }
    return;
  }
  // Enter and space press the button or link that has the focus.
  if ([" ", "Enter"].includes(event.key) && event.target.closest("button, a, summary")) return;
  const button = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (!button || button.disabled || !button.checkVisibility()) return;
  event.preventDefault();
  button.click();
});

// Somebody is looking: an episode that nobody looks at is closed after a while.
setInterval(() => {
  const game = find(".game");
  if (game && !("over" in game.dataset)) fetch(`${game.dataset.here}/seen`, { method: "POST" }).catch(() => {});
}, 30_000);

draw();
