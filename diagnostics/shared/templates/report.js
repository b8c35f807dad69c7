"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const view = document.getElementById("view");
  const graph = document.getElementById("graph");
  const details = document.getElementById("details");
  if (!view || !graph) return;

  const SVG = "http://www.w3.org/2000/svg";
  const whole = { w: graph.width.baseVal.value, h: graph.height.baseVal.value };
  const box = { x: 0, y: 0, scale: 1 };

  // ---- zooming and panning: the SVG fills its frame, its view box moves
  view.classList.add("live");
  view.style.height = `${Math.max(220, Math.min(560, whole.h))}px`;
  graph.setAttribute("width", "100%");
  graph.setAttribute("height", "100%");
  graph.setAttribute("preserveAspectRatio", "xMinYMin meet");
  const size = () => ({ w: view.clientWidth || 1, h: view.clientHeight || 1 });
  const show = () => {
    const s = size();
    const clamp = (at, room, all) => Math.min(Math.max(at, Math.min(0, all - room) - 60), Math.max(0, all - room) + 60);
    box.x = clamp(box.x, s.w / box.scale, whole.w);
    box.y = clamp(box.y, s.h / box.scale, whole.h);
    graph.setAttribute("viewBox", `${box.x} ${box.y} ${s.w / box.scale} ${s.h / box.scale}`);
  };
  const smallest = () => Math.min(size().w / whole.w, size().h / whole.h, 1);
  const zoom = (factor, px, py) => {
    const s = size();
    const x = px === undefined ? s.w / 2 : px, y = py === undefined ? s.h / 2 : py;
    const next = Math.min(Math.max(box.scale * factor, smallest() * 0.8), 4);
    box.x += x / box.scale - x / next;
    box.y += y / box.scale - y / next;
    box.scale = next;
    show();
  };
  const reset = () => {
    // the smallest text has 10 px and must not fall below 9 on a telephone, which shows a part of the graph instead
    box.scale = Math.min(1, Math.max(size().w < 600 ? 0.9 : 0, size().w / whole.w));
    box.x = 0; box.y = 0;
    show();
  };
  const fit = () => {
    box.scale = smallest();
    box.x = (whole.w - size().w / box.scale) / 2; box.y = (whole.h - size().h / box.scale) / 2;
    show();
  };
  const on = (id, act) => document.getElementById(id).addEventListener("click", act);
  on("zoom-in", () => zoom(1.3));
  on("zoom-out", () => zoom(1 / 1.3));
  on("zoom-fit", fit);
  on("zoom-reset", reset);
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const frame = view.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 400), event.clientX - frame.left, event.clientY - frame.top);
  }, { passive: false });
  let drag = null;
  view.addEventListener("pointerdown", (event) => {
    if (event.button === 0) drag = { x: event.clientX, y: event.clientY, moved: false };
  });
  window.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (!drag.moved && Math.hypot(dx, dy) < 5) return;
    drag.moved = true;
    view.classList.add("dragging");
    box.x -= dx / box.scale; box.y -= dy / box.scale;
    drag.x = event.clientX; drag.y = event.clientY;
    show();
  });
  let swallow = false;
  const drop = () => { swallow = Boolean(drag && drag.moved); drag = null; view.classList.remove("dragging"); setTimeout(() => { swallow = false; }, 0); };
  window.addEventListener("pointerup", drop);
  window.addEventListener("pointercancel", drop);
  view.addEventListener("keydown", (event) => {
    const step = 60 / box.scale;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (moves[event.key]) { box.x += moves[event.key][0]; box.y += moves[event.key][1]; show(); event.preventDefault(); }
    else if (event.key === "+") zoom(1.3);
    else if (event.key === "-") zoom(1 / 1.3);
    else if (event.key === "0") reset();
  });
  window.addEventListener("resize", show);
  const paper = () => { graph.setAttribute("viewBox", `0 0 ${whole.w} ${whole.h}`); };
  window.addEventListener("beforeprint", paper);
  window.addEventListener("afterprint", show);
  reset();

  // ---- details of a layer, or of a group of units
  const make = (name, text, kind) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const count = (n) => n.toLocaleString("en");
  const nouns = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
  const ten = (log) => (Math.abs(log) < 4 ? Number((10 ** log).toPrecision(3)).toString() : `10^${log.toFixed(1)}`);
  const group = (id) => data.graph.groups.find((one) => one.id === id);
  const named = (ids) => ids.map((id) => (id === 0 ? "the root (fixed scale)" : `${nouns(group(id).units, "unit")} (${group(id).ids})`)).join("; ");

  const mask = (picture) => {
    const svg = document.createElementNS(SVG, "svg");
    const cell = Math.max(3, Math.min(12, Math.floor(260 / Math.max(picture.wide, picture.high))));
    svg.setAttribute("class", "mask");
    svg.setAttribute("width", picture.wide * cell);
    svg.setAttribute("height", picture.high * cell);
    svg.setAttribute("viewBox", `0 0 ${picture.wide * cell} ${picture.high * cell}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "Where the skeleton lies in this tensor");
    for (const [row, column, kind] of picture.cells) {
      const rect = document.createElementNS(SVG, "rect");
      rect.setAttribute("class", `cell${kind}`);
      rect.setAttribute("x", column * cell); rect.setAttribute("y", row * cell);
      rect.setAttribute("width", cell); rect.setAttribute("height", cell);
      svg.append(rect);
    }
    return svg;
  };
  const key = () => {
    const line = make("p", undefined, "hint");
    line.append(make("span", "\u25a0 entering", "key1"), " ", make("span", "\u25a0 leaving", "key2"), " ", make("span", "\u25a0 both", "key3"), " tree");
    return line;
  };
  const scales = (one) => {
    const found = [];
    if (one.prefix) found.push(`product of weights from the root ${ten(one.prefix[0])} to ${ten(one.prefix[2])}, median ${ten(one.prefix[1])}`);
    if (one.suffix) found.push(`on to the root ${ten(one.suffix[0])} to ${ten(one.suffix[2])}, median ${ten(one.suffix[1])}`);
    return found.length ? found.join("; ") : "a weight of 0 on the trees leaves no scale";
  };
  const units = (one) => {
    const part = document.createDocumentFragment();
    part.append(make("h4", `${nouns(one.units, "unit")}, number${one.units === 1 ? "" : "s"} ${one.ids}`));
    part.append(make("p", `Scales: ${scales(one)}.`));
    if (one.approximate) part.append(make("p", `${count(one.approximate)} of them exact only for epsilon 0 (a normalisation follows).`));
    return part;
  };
  const layer = (row) => {
    const one = data.graph.layers[row];
    details.replaceChildren(make("h3", one.name || "(model)"));
    details.append(make("p", `Reads ${named(one.reads)}; feeds ${named(one.writes)}.`));
    if (one.after !== null) details.append(make("p", `Its normalisation ends the paths of ${named([one.after])}.`));
    const measured = (data.signal.rows || []).find((entry) => entry.layer === one.module);
    if (measured) {
      const gain = measured.vjp_gain === null ? "" : `, VJP gain ${Number(measured.vjp_gain.toPrecision(3))}`;
      details.append(make("p", `${measured.kind}: output variance ${Number((measured.variance || 0).toPrecision(3))}${gain}.`));
    }
    for (const tensor of one.tensors) {
      details.append(make("h4", `${tensor.name}  ${tensor.shape.join("x") || "scalar"}`));
      const unused = tensor.unused ? `, ${count(tensor.unused)} unused` : "";
      details.append(make("p", `${nouns(tensor.edges, "weight")}${unused}${tensor.rms === null ? "" : `, RMS ${Number(tensor.rms.toPrecision(3))}`}; ${count(tensor.incoming)} enter a unit first, ${count(tensor.outgoing)} leave one last, ${count(tensor.skeleton)} on the skeleton.`));
      if (tensor.aliases.length) details.append(make("p", `Also called ${tensor.aliases.join(", ")}.`));
      if (tensor.mask) {
        details.append(mask(tensor.mask), key());
        const shown = tensor.mask.rows === tensor.mask.high && tensor.mask.columns === tensor.mask.wide;
        if (!shown) details.append(make("p", `${count(tensor.mask.rows)} x ${count(tensor.mask.columns)} entries in ${tensor.mask.high} x ${tensor.mask.wide} cells.`, "hint"));
      }
    }
    const seen = new Set();
    for (const id of [...one.reads, ...one.writes]) {
      if (id !== 0 && !seen.has(id)) { seen.add(id); details.append(units(group(id))); }
    }
  };
  const lane = (id) => {
    const one = group(id);
    details.replaceChildren(make("h3", nouns(one.units, "unit")), units(one));
    const list = (title, rows) => {
      details.append(make("h4", title));
      details.append(make("p", rows.length ? rows.map((row) => data.graph.layers[row].name || "(model)").join(", ") : "no layer"));
    };
    list("Fed by", one.entering);
    list("Read by", one.leaving);
  };
  const choose = (target) => {
    graph.querySelectorAll(".chosen").forEach((old) => old.classList.remove("chosen"));
    target.classList.add("chosen");
    if (target.dataset.layer !== undefined) layer(Number(target.dataset.layer));
    else lane(Number(target.dataset.group));
    details.scrollTop = 0;
  };
  graph.addEventListener("click", (event) => {
    const target = event.target.closest(".layer, .group");
    if (target && !swallow) choose(target);
  });
  graph.addEventListener("keydown", (event) => {
    const target = event.target.closest(".layer, .group");
    if (target && (event.key === "Enter" || event.key === " ")) { choose(target); event.preventDefault(); }
  });

  // ---- finding a layer by name
  const search = document.getElementById("search");
  search.addEventListener("input", () => {
    graph.querySelectorAll(".found").forEach((old) => old.classList.remove("found"));
    const wanted = search.value.trim().toLowerCase();
    if (!wanted) return;
    const row = data.graph.layers.findIndex((one) => one.name.toLowerCase().includes(wanted));
    if (row < 0) return;
    const target = graph.querySelector(`[data-layer="${row}"]`);
    target.classList.add("found");
    const at = target.querySelector("rect");
    box.y = Number(at.getAttribute("y")) - size().h / box.scale / 2;
    show();
  });
  search.addEventListener("keydown", (event) => {
    const target = graph.querySelector(".found");
    if (event.key === "Enter" && target) choose(target);
  });
})();
