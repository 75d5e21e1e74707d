-- Renews the leases of what a member holds. KEYS: stream. ARGV: group, member, ids.
-- Answer: two lists of places among the ids: owned by another, and gone from the stream.
local stream, group, me = KEYS[1], ARGV[1], ARGV[2]
local lost, gone, at, ids = {}, {}, {}, {}
for i = 3, #ARGV do
  local held = redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1)[1]
  if held and held[2] == me then
    ids[#ids + 1] = ARGV[i]
    at[ARGV[i]] = i - 3
  else
    lost[#lost + 1] = i - 3
  end
end
if #ids > 0 then
  local claim = {'XCLAIM', stream, group, me, 0}
  for _, id in ipairs(ids) do
    claim[#claim + 1] = id
  end
  claim[#claim + 1] = 'JUSTID'
  for _, id in ipairs(redis.call(unpack(claim))) do
    at[id] = nil
  end
  for _, place in pairs(at) do
    gone[#gone + 1] = place
  end
end
return {lost, gone}
