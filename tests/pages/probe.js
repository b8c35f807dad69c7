(() => {
  const seen = { errors };
  const $ = (id) => document.getElementById(id);
  const box = () => $("graph").getAttribute("viewBox").split(" ").map(Number);
  const click = (target) => target.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  const key = (target, name) => target.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
  const pointer = (kind, x, y) => new PointerEvent(kind, { clientX: x, clientY: y, button: 0, bubbles: true });
  seen.start = box();
  click($("zoom-in")); seen.zoomed = box();
  $("view").dispatchEvent(pointer("pointerdown", 200, 200));
  window.dispatchEvent(pointer("pointermove", 150, 120)); seen.moved = box();
  window.dispatchEvent(pointer("pointerup", 150, 120));
  const first = document.querySelector(".layer");
  click(first); seen.swallowed = !document.querySelector(".chosen");
  $("view").dispatchEvent(pointer("pointerdown", 150, 120));
  window.dispatchEvent(pointer("pointerup", 150, 120));
  click($("zoom-reset")); seen.reset = box();
  click($("zoom-fit")); seen.fit = box();
  const wheel = (ctrlKey) => new WheelEvent("wheel", { deltaY: -200, ctrlKey, bubbles: true, cancelable: true });
  $("view").dispatchEvent(wheel(false)); seen.scrolled = box();
  $("view").dispatchEvent(wheel(true)); seen.wheeled = box();
  seen.layers = [...document.querySelectorAll(".layer")].map((layer) => {
    click(layer);
    return { title: $("details").querySelector("h3").textContent, text: $("details").textContent,
             cells: $("details").querySelectorAll(".mask rect").length,
             chosen: document.querySelectorAll(".chosen").length };
  });
  seen.groups = [...document.querySelectorAll(".group")].map((group) => {
    key(group, "Enter");
    return $("details").textContent;
  });
  $("search").value = "2"; $("search").dispatchEvent(new Event("input"));
  seen.found = document.querySelector(".found").dataset.layer;
  window.dispatchEvent(new Event("beforeprint")); seen.paper = box();
  window.dispatchEvent(new Event("afterprint"));
  seen.size = [$("graph").clientWidth, $("view").clientHeight];
  seen.background = getComputedStyle(document.body).backgroundColor;
  seen.wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
  const out = document.createElement("pre");
  out.id = "probe"; out.textContent = JSON.stringify(seen);
  document.body.append(out);
})();
